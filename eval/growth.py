"""Which candidate tree to draft: grown from how often each rank of each head is right (methods.md, section 3).

Shapes: P positions of held-out text, K heads, R ranks.
"""

from __future__ import annotations

import heapq
from math import prod

import torch
from torch import Tensor

from eval.tree import TreeShape
from heads.errors import HeadwayError


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


def grow(accuracy_KR: Tensor, size: int) -> TreeShape:
    """The tree of `size` nodes whose expected accepted length is largest, a path's chance being the product of its ranks'.

    Best first over (next sibling, first child); siblings in the order of their accuracy. A child's chance is never
    above its parent's nor a later sibling's above an earlier one's, so the best nodes hang together and greedy growth
    is optimal. Nodes of chance 0 are left out, so that the tree may be smaller. Raises HeadwayError for a size below 1
    and accuracies that leave no node.
    """
    if size < 1:
        raise HeadwayError(f"tree of {size} nodes: give at least 1, such as 8 to 64")
    accuracies = accuracy_KR.tolist()
    orders = [[rank for _, rank in sorted((-share, rank) for rank, share in enumerate(row))] for row in accuracies]

    def candidate(places: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        """Heap entry of a node by its places in the orders: less is better."""
        chance = prod(accuracies[depth][orders[depth][place]] for depth, place in enumerate(places))
        return -chance, len(places), places

    heap = [candidate((0,))]
    chosen: list[list[int]] = []
    while heap and len(chosen) < size:
        chance, depth, places = heapq.heappop(heap)
        if chance == 0:
            break
        chosen.append([orders[level][place] for level, place in enumerate(places)])
        if places[-1] + 1 < len(orders[depth - 1]):
            heapq.heappush(heap, candidate((*places[:-1], places[-1] + 1)))
        if depth < len(orders):
            heapq.heappush(heap, candidate((*places, 0)))
    if not chosen:
        raise HeadwayError("tree: the head was never right on the text it was measured on; train it, or give more text")
    return TreeShape.of(chosen)


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
