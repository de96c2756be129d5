"""A drafter that knows what the target will write, and spoils some of it: every acceptance length occurs."""

from __future__ import annotations

import torch

from eval.drafters import Committed
from eval.tree import DraftTree


class ScriptedDrafter:
    """Drafts the text it was told the target writes, with every `wrong`-th position spoilt; optionally as a tree.

    `texts`: prompt -> greedy output; `vocabulary`: ids lie below it.
    """

    name = "scripted"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        texts: dict[tuple[int, ...], list[int]],
        length: int,
        wrong: int,
        tree: bool = False,
        vocabulary: int = 288,
    ) -> None:
        self.texts, self.length, self.wrong, self.tree, self.vocabulary = texts, length, wrong, tree, vocabulary
        self.depth = length
        self.most_drafts = length * (2 if tree else 1)

    def start(self, *_: object) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        pass

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        return DraftTree.from_lists(root_B, [self._nodes(ids, length or self.length) for ids in sequences])

    def _nodes(self, ids: list[int], length: int) -> list[tuple[int, int]]:
        prompt, text = next(item for item in self.texts.items() if tuple(ids[: len(item[0])]) == item[0])
        right = [*prompt, *text][len(ids) : len(ids) + length]
        pairs: list[tuple[int, int]] = []
        parent = 0
        for depth, token in enumerate(right):
            spoilt = (len(ids) + depth) % self.wrong == 0
            if self.tree:  # a wrong sibling before the right one, so that accepted slots must be moved
                pairs.append(((token + 1) % self.vocabulary, parent))
            pairs.append(((token + 2 * spoilt) % self.vocabulary, parent))
            parent = len(pairs)
        return pairs
