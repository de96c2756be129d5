"""Drafters: what proposes the tokens that the target verifies. The decode loop knows nothing else of them.

Shapes: B rows, L tokens committed by a pass, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from eval.chooser import Chooser
from eval.sampling import Sampling
from eval.tree import DraftTree


@dataclass(frozen=True)
class Committed:
    """What one pass of the target added to each row's cache, and the token that came out of it.

    last_BLH: the states (after the final norm) of the committed tokens, right-padded; counts_B: how many there are
    (int64, at least 1); taps: tap -> [B, L, H]; tokens_BL: their ids; root_B: the token drawn after the last of them,
    which is not in the cache yet and is the root of the next tree; logits_BNV: the target's logits after every node of
    the tree that was verified, accepted or not (None for the prompt).
    """

    tokens_BL: torch.Tensor
    last_BLH: torch.Tensor
    taps: dict[int, torch.Tensor]
    counts_B: torch.Tensor
    root_B: torch.Tensor
    logits_BNV: torch.Tensor | None = None

    def final_BH(self) -> torch.Tensor:
        """[B, H]: the state of each row's last committed token, the one whose logits gave the root."""
        return self.last_BLH[torch.arange(len(self.counts_B), device=self.counts_B.device), self.counts_B - 1]


class Drafter(Protocol):
    """Proposes a tree a round. One object serves one `decode` call at a time; `start` makes it forget the last.

    name: what reports call it; most_drafts: an upper bound of the nodes beside the root; depth: how deep they may lie;
    taps: the layers whose inputs `observe` wants to see.
    """

    name: str
    most_drafts: int
    depth: int
    taps: tuple[int, ...]

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Begin a batch of `rows` sequences, decoded under `sampling`.

        A drafter that samples draws through `chooser.draft`, from the very law that its tree states.
        """

    def observe(self, committed: Committed) -> None:
        """Learn what a pass committed: the prompt first, then each round's accepted path."""

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        """The tree to verify next. `sequences` are the rows' ids so far, prompt and output, the root last.

        `length`: how deep it may be this time, at least 1; None: as deep as it gets. A round without a draft does not ask.
        """
