"""Prompt lookup (methods.md, section 5): what followed the last occurrence of the text's end is proposed again."""

from __future__ import annotations

import torch

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError

DRAFT_LENGTH, LONGEST = 10, 3


class RunIndex:
    """Where each run of up to `longest` ids of a growing text last ended: O(longest) a token, whatever the text's length."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._end: dict[tuple[int, ...], int] = {}
        self._read = 1

    def continuation(self, ids: list[int], count: int) -> list[int]:
        """Up to `count` ids that followed the most recent earlier occurrence of the last n ids, n = `longest` down to 1.

        Empty when nothing matches. A continuation cut short by the end of the text is allowed. `ids` is the text of
        the last call, or more of it.
        """
        # a run is entered when the id behind it is there, so the text's end never matches itself
        for end in range(self._read, len(ids)):
            for size in range(1, min(self.longest, end) + 1):
                self._end[tuple(ids[end - size : end])] = end
        self._read = max(self._read, len(ids))
        for size in range(min(self.longest, len(ids) - 1), 0, -1):
            end = self._end.get(tuple(ids[-size:]), 0)
            if end:
                return ids[end : end + count]
        return []


def chains(root_B: torch.Tensor, found: list[list[int]]) -> DraftTree:
    """A chain a row, as long as the ids found for it."""
    width = max(map(len, found))
    if width == 0:
        return DraftTree.root_only(root_B)
    # one copy to the device, of pageable memory: the host need not wait for it
    packed_BX = torch.tensor([[len(ids), *ids, *[0] * (width - len(ids))] for ids in found])
    packed_BX = packed_BX.to(root_B.device, non_blocking=True)
    return DraftTree.chain(root_B, packed_BX[:, 1:], packed_BX[:, 0])


class LookupDrafter:
    """Drafts by matching the last `longest` ids (then fewer) against the text so far; needs no model."""

    name = "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, draft_length: int = DRAFT_LENGTH, longest: int = LONGEST) -> None:
        if draft_length < 1 or longest < 1:
            raise HeadwayError(f"lookup: draft_length {draft_length} and longest {longest} must be at least 1")
        self.most_drafts = self.depth = draft_length
        self.longest = longest

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """An empty index a row."""
        self._indices = [RunIndex(self.longest) for _ in range(rows)]

    def observe(self, committed: Committed) -> None:
        """Nothing to learn: the texts are handed in with each draft."""

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        """A chain per row, as long as what was found."""
        rows, most = zip(self._indices, sequences, strict=True), length or self.depth
        return chains(root_B, [index.continuation(ids, most) for index, ids in rows])
