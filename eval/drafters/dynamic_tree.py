"""Dynamic draft trees (methods.md, section 4; Li et al. 2024, "EAGLE-2", section 4): the tree follows the draft's own belief.

A node's score is the log of its path's probability under the draft. Each level expands the k best nodes of the last one,
and all candidates stay in a pool; the best of the whole pool become the tree. Nothing is sampled, so any such choice
keeps the target's law (eval/verify.py, `match`).

Shapes: B rows, K nodes expanded on a level, P pool (level after level; a level's candidates by parent, then by rank),
M nodes without the root, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.drafters.eagle import EagleDrafting
from eval.drafters.eagle_passes import TargetFunctions
from eval.law import PointMass
from eval.tree import ROOT, DraftTree
from heads.eagle import EagleHead
from heads.errors import HeadwayError

Expand = Callable[[Tensor, Tensor, int], Tensor]
"""(tokens [B, K], each one's parent among the nodes expanded before [B, K], depth) -> draft logits after them [B, K, D].

The parents of depth 1 are all the root, and numbered 0.
"""


@dataclass(frozen=True)
class TreeSize:
    """`k`: nodes expanded on a level and candidates of each; `total`: nodes of the tree, the root included; `depth`."""

    k: int = 10
    total: int = 60
    depth: int = 6

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("total", 2), ("depth", 1)):
            value = getattr(self, name)
            if value < least:
                raise HeadwayError(f"dynamic tree: {name} {value}; it must be at least {least}")


@dataclass
class _Pool:
    """Candidates so far, level after level: scores, target ids and parents (an index of the pool, -1 for the root)."""

    scores: list[Tensor]
    tokens: list[Tensor]
    parents: list[Tensor]

    def add(self, score_BX: Tensor, token_BX: Tensor, parent_BX: Tensor) -> None:
        self.scores.append(score_BX)
        self.tokens.append(token_BX)
        self.parents.append(parent_BX)


def best_first(score_BX: Tensor, count: int) -> Tensor:
    """[B, count] int64: the places of the largest scores, best first; of equal ones the first (topk leaves that open)."""
    return score_BX.sort(dim=1, descending=True, stable=True).indices[:, :count]


def grow_dynamic(root_B: Tensor, logits_BD: Tensor, expand: Expand, size: TreeSize, target_ids_D: Tensor) -> DraftTree:
    """The tree over `logits_BD`, the draft's logits after the root.

    `expand` is called for depths 1 to size.depth - 1. Ties go to the shallower node, then to the one that stands first in the pool:
    a child never scores above its parent, so the nodes that are kept hang together.
    """
    width = min(size.k, logits_BD.shape[-1])
    pool = _Pool([], [], [])
    score_BK, ids_BK = _candidates(logits_BD, width)
    pool.add(score_BK, target_ids_D[ids_BK], torch.full_like(ids_BK, ROOT))
    place_BK = torch.arange(width, device=root_B.device).expand_as(ids_BK)
    above_BK, token_BK, start = torch.zeros_like(ids_BK), pool.tokens[0], 0
    for depth in range(1, size.depth):
        step_BKR, ids_BKR = _candidates(expand(token_BK, above_BK, depth), width)
        parent_BX = (place_BK + start).repeat_interleave(width, 1)
        pool.add((score_BK[..., None] + step_BKR).flatten(1), target_ids_D[ids_BKR].flatten(1), parent_BX)
        start += pool.scores[-2].shape[1]
        place_BK = best_first(pool.scores[-1], size.k)
        above_BK, score_BK = place_BK // width, pool.scores[-1].gather(1, place_BK)
        token_BK = pool.tokens[-1].gather(1, place_BK)
    return _tree(root_B, pool, size, width)


def _candidates(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and draft ids of the `width` likeliest tokens, on the last axis."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    best = exact.topk(width)
    return best.values - exact.logsumexp(-1, keepdim=True), best.indices


def _tree(root_B: Tensor, pool: _Pool, size: TreeSize, width: int) -> DraftTree:
    score_BP, parent_BP = torch.cat(pool.scores, 1), torch.cat(pool.parents, 1)
    kept_BM = best_first(score_BP, size.total - 1)
    nodes_M = torch.arange(1, kept_BM.shape[1] + 1, device=root_B.device)
    node_BP = torch.zeros_like(parent_BP).scatter(1, kept_BM, nodes_M.expand_as(kept_BM))
    above_BM = parent_BP.gather(1, kept_BM)
    parent_BM = node_BP.gather(1, above_BM.clamp(min=0)).masked_fill(above_BM == ROOT, 0)
    tokens_BN = torch.cat([root_B[:, None], torch.cat(pool.tokens, 1).gather(1, kept_BM)], 1)
    parents_BN = torch.cat([torch.full_like(root_B, ROOT)[:, None], parent_BM], 1)
    return DraftTree(tokens_BN, parents_BN, PointMass(tokens_BN), min(size.depth, size.total - 1), width)


class DynamicTreeDrafter(EagleDrafting):
    """EAGLE-2's tree over a head of any version. Chosen without sampling, at any temperature."""

    name = "eagle-tree"

    def __init__(self, head: EagleHead, target: TargetFunctions, size: TreeSize, compiled: bool = False) -> None:
        """`compiled`: draft steps by torch.compile."""
        super().__init__(head, target, size.depth, size.total - 1, compiled)
        self.size = size

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """The tree, down to the depth that the round and the head's positions allow."""
        counts = self.counts(sequences, length)
        depth = max(counts)
        if depth == 0:
            return DraftTree.root_only(root_B)
        features_BH, hidden_BH = self.passes.follow(sequences, self.size.k * (depth - 1))
        features_BKH, ancestors_BKM = features_BH[:, None], root_B.new_empty(len(root_B), 1, 0, dtype=torch.bool)

        def expand(token_BK: Tensor, above_BK: Tensor, level: int) -> Tensor:
            nonlocal features_BKH, ancestors_BKM
            own_KK = torch.eye(token_BK.shape[1], dtype=torch.bool, device=root_B.device)
            ancestors_BKM = torch.cat([_rows_at(ancestors_BKM, above_BK), own_KK.expand(len(root_B), -1, -1)], 2)
            features_BKH = _rows_at(features_BKH, above_BK)
            features_BKH, hidden_BKH = self.passes.step(features_BKH, token_BK, level, ancestors_BKM)
            return self.passes.logits(hidden_BKH)

        size = replace(self.size, depth=depth)
        tree = grow_dynamic(root_B, self.passes.logits(hidden_BH), expand, size, self.target_ids_D)
        return tree if min(counts) == depth else tree.cut(self.counts_B(counts))


def _rows_at(values_BKX: Tensor, index_BW: Tensor) -> Tensor:
    """[B, W, X]: the values at each row's places."""
    return values_BKX.gather(1, index_BW[..., None].expand(-1, -1, values_BKX.shape[2]))
