"""Prompt lookup (methods.md, section 5): what followed the last occurrence of the text's end is proposed again."""

from __future__ import annotations

import torch

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError


def continuation(ids: list[int], longest: int, count: int) -> list[int]:
    """Up to `count` ids that followed the most recent earlier occurrence of the last n ids, n = `longest` down to 1.

    Empty when nothing matches. A continuation cut short by the end of the text is allowed.
    """
    for size in range(min(longest, len(ids) - 1), 0, -1):
        end = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == end:
                return ids[start + size : start + size + count]
    return []


class LookupDrafter:
    """Drafts by matching the last `longest` ids (then fewer) against the text so far; needs no model."""

    name = "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, draft_length: int = 10, longest: int = 3) -> None:
        if draft_length < 1 or longest < 1:
            raise HeadwayError(f"lookup: draft_length {draft_length} and longest {longest} must be at least 1")
        self.most_drafts, self.longest = draft_length, longest

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Nothing to forget: every draft is made from the sequences handed in."""

    def observe(self, committed: Committed) -> None:
        """Nothing to learn."""

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor) -> DraftTree:
        """A chain per row, as long as what was found."""
        found = [continuation(ids, self.longest, self.most_drafts) for ids in sequences]
        width = max(map(len, found))
        drafts_BK = torch.tensor([ids + [0] * (width - len(ids)) for ids in found], dtype=torch.long)
        counts_B = torch.tensor([len(ids) for ids in found])
        return DraftTree.chain(root_B, drafts_BK.to(root_B.device), counts_B.to(root_B.device))
