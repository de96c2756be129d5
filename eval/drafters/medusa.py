"""Medusa heads as a drafter (methods.md, section 3): each head's first choice, as a chain."""

from __future__ import annotations

import torch

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError
from heads.medusa import MedusaHead


class MedusaDrafter:
    """Drafts up to K tokens from the state whose logits gave the root: head k proposes the token k + 1 after it."""

    name = "medusa"
    taps: tuple[int, ...] = ()

    def __init__(self, head: MedusaHead, draft_length: int | None = None) -> None:
        """`draft_length` heads are used, all by default. Raises HeadwayError when the head has fewer."""
        heads = head.config.num_heads
        self.head, self.most_drafts = head, heads if draft_length is None else draft_length
        if not 1 <= self.most_drafts <= heads:
            raise HeadwayError(f"draft length {draft_length}: this checkpoint has heads for 1 to {heads}")

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Nothing to forget: `observe` replaces the state."""

    def observe(self, committed: Committed) -> None:
        """Keep the state that the next draft starts from."""
        self.state_BH = committed.final_BH()

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor) -> DraftTree:
        """A chain of `most_drafts` tokens a row."""
        return DraftTree.chain(root_B, self.head.draft_ids(self.state_BH)[:, : self.most_drafts])
