"""Which candidate tree to draft: grown from how often the candidates are right (methods.md, section 3).

Shapes: P positions of held-out text, K heads, R ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eval.tree import TreeShape
from heads.errors import HeadwayError

Path = tuple[int, ...]
Shares = Callable[[Path], Sequence[float]]
"""From a path of ranks to the accuracy of each rank behind it, on condition that the path is right; none: no head left."""

PRIOR = 20  # positions by which the average over all prefixes outweighs a prefix that was seldom right


def conditional_accuracies(ranks_PK: Tensor, ranks: int) -> Tensor:
    """[K, R] float64: how often rank r of head k is the text's token, among positions where the prefix is right.

    `ranks_PK`: rank that each head gives the text's token; `ranks` or more where it is not among the first R, -1 where
    the text ends before. The prefix is right where all earlier heads had the text's token among their first R: there
    some path of the full tree is right so far.
    """
    accuracy_KR = torch.zeros(ranks_PK.shape[1], ranks, dtype=torch.float64)
    right_P = torch.ones(len(ranks_PK), dtype=torch.bool)
    for head, rank_P in enumerate(ranks_PK.unbind(1)):
        offered_P = right_P & (rank_P >= 0)
        right_P = offered_P & (rank_P < ranks)
        counts_R = torch.bincount(rank_P[right_P], minlength=ranks)
        accuracy_KR[head] = counts_R / offered_P.sum().clamp(min=1)
    return accuracy_KR


def measured_shares(ranks_PK: Tensor, ranks: int) -> Shares:
    """Accuracies behind each single prefix, drawn towards `conditional_accuracies` where it was seldom right.

    A head is right more often behind the first choices than behind the fourth ones: with one accuracy a rank, whatever
    the prefix, trees of 24 to 64 nodes accept 1 to 3 % less on text they were not grown on.
    """
    average = conditional_accuracies(ranks_PK, ranks).tolist()
    offered: Counter[Path] = Counter()  # positions where the path is right and the text goes on
    right: Counter[Path] = Counter()
    for row in ranks_PK.tolist():
        for depth, rank in enumerate(row):
            if rank < 0:
                break
            offered[tuple(row[:depth])] += 1
            if rank >= ranks:
                break
            right[tuple(row[: depth + 1])] += 1

    def shares(path: Path) -> Sequence[float]:
        if len(path) == len(average):
            return ()
        total = offered[path] + PRIOR
        return [(right[*path, rank] + PRIOR * share) / total for rank, share in enumerate(average[len(path)])]

    return shares


def grow(shares: Shares, size: int) -> TreeShape:
    """The tree of `size` nodes whose expected accepted length is largest: the sum over nodes of their path's chance.

    A path's chance is the product of its shares. Best first over (next sibling, first child), siblings in the order of
    their shares: a child's chance is never above its parent's nor a later sibling's above an earlier one's, so the best
    nodes hang together and greedy growth is optimal. Nodes of chance 0 are left out, so that the tree may be smaller.
    Raises HeadwayError for a size below 1 and for shares that leave no node.
    """
    if size < 1:
        raise HeadwayError(f"tree of {size} nodes: give at least 1, such as 8 to 64")
    siblings: dict[Path, list[tuple[float, int]]] = {}  # parent -> (-share, rank), best first
    heap: list[tuple[float, int, Path, int]] = []  # (-chance, depth, parent, place among the siblings)
    chances: dict[Path, float] = {(): 1.0}

    def offer(parent: Path, place: int) -> None:
        if parent not in siblings:
            siblings[parent] = sorted((-share, rank) for rank, share in enumerate(shares(parent)))
        if place < len(siblings[parent]):
            heapq.heappush(heap, (chances[parent] * siblings[parent][place][0], len(parent), parent, place))

    offer((), 0)
    while heap and len(chances) <= size:
        chance, _, parent, place = heapq.heappop(heap)
        if chance == 0:
            break
        path = (*parent, siblings[parent][place][1])
        chances[path] = -chance
        offer(parent, place + 1)
        offer(path, 0)
    del chances[()]
    if not chances:
        raise HeadwayError("tree: the head was never right on the text it was measured on; train it, or give more text")
    return TreeShape.of(list(chances))


def accepted_length(ranks_PK: Tensor, shape: TreeShape) -> float:
    """Mean accepted drafts over positions: the deepest path of the tree that the text takes from there."""
    paths = set(shape.paths)
    total = 0
    for ranks in ranks_PK.tolist():
        depth = 0
        while depth < len(ranks) and tuple(ranks[: depth + 1]) in paths:
            depth += 1
        total += depth
    return total / max(1, len(ranks_PK))
