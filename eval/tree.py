"""Draft trees: what a drafter proposes for each row of a batch in one round.

Node 0 is the root, the row's last emitted token, whose logits the verification pass computes first. A chain is a tree
of width 1, no draft is the root alone, and rows of different size are padded with nodes whose parent is -2.

Shape suffixes: B rows, N nodes, M nodes without the root, K drafts of a chain, V vocabulary, W siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.chooser import Chooser
from eval.law import Dense, Law, PointMass, without_token
from heads.errors import HeadwayError

ROOT, PADDING = -1, -2


@dataclass(frozen=True)
class TreeShape:
    """A static tree: `paths[i]` lists the child ranks from the root to node i + 1, e.g. ((0,), (1,), (0, 0)).

    Paths are kept sorted by length and then by rank, so a parent's node index is smaller than its child's.
    """

    paths: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> TreeShape:
        """Check and sort the paths. Raises HeadwayError for a repeated, empty or orphaned path."""
        kept = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        if len(kept) != len(paths):
            raise HeadwayError("tree shape: a path is given twice; give each node once")
        known = {(), *kept}
        for path in kept:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise HeadwayError(f"tree shape: path {list(path)} has no parent in the tree; add {list(path[:-1])}")
        return TreeShape(tuple(kept))

    @property
    def parents(self) -> list[int]:
        """Parent's node index of every node, the root (-1) included: N = len(paths) + 1 numbers."""
        index = {path: node for node, path in enumerate(((), *self.paths))}
        return [ROOT, *(index[path[:-1]] for path in self.paths)]

    @property
    def depths(self) -> list[int]:
        """Depth of every node without the root, 1 for the root's children."""
        return [len(path) for path in self.paths]

    @property
    def ranks(self) -> list[int]:
        """Child rank (the last step of its path) of every node without the root."""
        return [path[-1] for path in self.paths]

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for the root alone."""
        return max(self.depths, default=0)

    def cut(self, depth: int) -> TreeShape:
        """The shape without the nodes that lie deeper."""
        return TreeShape(tuple(path for path in self.paths if len(path) <= depth))

    @property
    def max_width(self) -> int:
        """Most children that any node has."""
        parents = self.parents[1:]
        return max((parents.count(parent) for parent in parents), default=0)


@lru_cache(maxsize=256)
def _shape_parents(shape: TreeShape, device: torch.device) -> Tensor:
    return torch.tensor(shape.parents, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _chain_shape(count: int) -> TreeShape:
    return TreeShape(tuple((0,) * depth for depth in range(1, count + 1)))


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens of B rows and how they hang together.

    tokens_BN   int64; node 0 is the last emitted token; padding nodes hold any id.
    parents_BN  int64; -1 for the root, -2 for padding, else the parent's node index, smaller than the node's own.
    law         PointMass: the drafts were chosen without sampling. Dense [B, N', V]: row n is the law that node n's
                children were drawn from, N' <= N; nodes from N' on have no children.
    max_depth   no node lies deeper (a host number, so that walking needs no synchronisation).
    max_width   no node has more children.
    replacement True: siblings were drawn i.i.d. (a token drawn twice is two nodes); False: without replacement.
                Siblings stand in the order they were drawn.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    law: Law
    max_depth: int
    max_width: int
    replacement: bool = True

    @staticmethod
    def root_only(root_B: Tensor) -> DraftTree:
        """No draft: the pass gives one token, which is plain decoding (and the prefill's own token)."""
        tokens_B1 = root_B[:, None]
        return DraftTree(tokens_B1, torch.full_like(tokens_B1, ROOT), PointMass(tokens_B1), 0, 0)

    @staticmethod
    def chain(
        root_B: Tensor, drafts_BK: Tensor, counts_B: Tensor | None = None, law_BKV: Tensor | None = None
    ) -> DraftTree:
        """A chain of K drafts. `counts_B`: drafts each row really has (the rest is padding).

        `law_BKV[:, k]` is the law that draft k was really sampled from; None: chosen without sampling.
        """
        tree = DraftTree.static(root_B, drafts_BK, _chain_shape(drafts_BK.shape[1]), law_BKV)
        if counts_B is None:
            return tree
        nodes_N = torch.arange(tree.nodes, device=root_B.device)
        parents_BN = tree.parents_BN.masked_fill(nodes_N > counts_B[:, None], PADDING)
        return DraftTree(tree.tokens_BN, parents_BN, tree.law, tree.max_depth, tree.max_width)

    @staticmethod
    def static(
        root_B: Tensor,
        tokens_BM: Tensor,
        shape: TreeShape,
        law_BNV: Tensor | None = None,
        replacement: bool = True,
    ) -> DraftTree:
        """Every row has the same shape; `tokens_BM[:, i]` is the token at `shape.paths[i]`. Laws as in the class."""
        tokens_BN = torch.cat([root_B[:, None], tokens_BM], 1)
        parents_BN = _shape_parents(shape, root_B.device).expand(tokens_BN.shape[0], -1)
        law: Law = PointMass(tokens_BN) if law_BNV is None else Dense(law_BNV)
        return DraftTree(tokens_BN, parents_BN, law, shape.max_depth, shape.max_width, replacement)

    @staticmethod
    def from_lists(root_B: Tensor, rows: Sequence[Sequence[tuple[int, int]]]) -> DraftTree:
        """Dynamic trees from the host: `rows[b]` lists (token, parent node index) of nodes 1, 2, ...; no sampling."""
        nodes = 1 + max(map(len, rows))
        tokens = [[0] * nodes for _ in rows]
        parents = [[ROOT] + [PADDING] * (nodes - 1) for _ in rows]
        max_depth = max_width = 0
        for row, pairs in enumerate(rows):
            depths, children = [0], [0] * nodes
            for node, (token, parent) in enumerate(pairs, start=1):
                if not 0 <= parent < node:
                    raise HeadwayError(f"draft tree: row {row} node {node} has parent {parent}; parents come first")
                tokens[row][node], parents[row][node] = token, parent
                depths.append(depths[parent] + 1)
                children[parent] += 1
            max_depth, max_width = max(max_depth, *depths), max(max_width, *children)
        tokens_BN = torch.tensor(tokens, dtype=torch.int64).to(root_B.device)
        tokens_BN[:, 0] = root_B
        parents_BN = torch.tensor(parents, dtype=torch.int64).to(root_B.device)
        return DraftTree(tokens_BN, parents_BN, PointMass(tokens_BN), max_depth, max_width)

    @property
    def nodes(self) -> int:
        """N: nodes of the widest row, root included."""
        return self.tokens_BN.shape[1]

    @cached_property
    def valid_BN(self) -> Tensor:
        """Bool: True for the root and for real drafts, False for padding."""
        return self.parents_BN != PADDING

    @cached_property
    def counts_B(self) -> Tensor:
        """Real drafts of each row, the root not counted."""
        return self.valid_BN.sum(1) - 1

    @cached_property
    def ranks_BN(self) -> Tensor:
        """How many siblings stand before each node: the order they are tried in."""
        same_BNN = self.parents_BN[:, :, None] == self.parents_BN[:, None, :]
        return same_BNN.tril(-1).sum(-1)

    def mask(self) -> Tensor:
        """Bool [B, N, N]: node (row) sees node (column) = itself and its ancestors. Padding sees itself alone."""
        return self._lineage[0]

    def positions(self) -> Tensor:
        """Depth of every node, int64 [B, N]: 0 for the root and for padding; add the root's position in the text."""
        return self._lineage[1]

    @cached_property
    def _lineage(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mask, depths and ancestors: `ancestors_BNL[b, n, k]` is k levels above node n (the root stays the root)."""
        node_N = torch.arange(self.nodes, device=self.tokens_BN.device)
        current_BN = node_N.expand_as(self.parents_BN)
        mask_BNN = current_BN[:, :, None] == node_N
        depth_BN = torch.zeros_like(self.parents_BN)
        ancestors = [current_BN]
        for _ in range(self.max_depth):
            above_BN = self.parents_BN.gather(1, current_BN)
            depth_BN = depth_BN + (above_BN >= 0)
            current_BN = torch.where(above_BN >= 0, above_BN, current_BN)
            mask_BNN = mask_BNN | (current_BN[:, :, None] == node_N)
            ancestors.append(current_BN)
        return mask_BNN, depth_BN, torch.stack(ancestors, -1)

    def paths(self) -> Tensor:
        """Node indices from the root to each node, int64 [B, N, max_depth + 1], -1 after the node itself."""
        _, depth_BN, ancestors_BNL = self._lineage
        levels_L = torch.arange(self.max_depth + 1, device=self.tokens_BN.device)
        up_BNL = depth_BN[:, :, None] - levels_L
        found_BNL = ancestors_BNL.gather(2, up_BNL.clamp(min=0))
        return found_BNL.where((up_BNL >= 0) & self.valid_BN[:, :, None], -1)

    def cut(self, depth_B: Tensor) -> DraftTree:
        """The tree without the nodes that lie deeper than `depth_B` of their row: they become padding."""
        return replace(self, parents_BN=self.parents_BN.masked_fill(self.positions() > depth_B[:, None], PADDING))

    def padded(self, nodes: int) -> DraftTree:
        """The tree with padding up to `nodes` nodes a row."""
        more = (0, nodes - self.nodes)
        tokens_BN = F.pad(self.tokens_BN, more)
        law = PointMass(tokens_BN) if isinstance(self.law, PointMass) else self.law
        return replace(self, tokens_BN=tokens_BN, parents_BN=F.pad(self.parents_BN, more, value=PADDING), law=law)

    def child_with(self, node_B: Tensor, token_B: Tensor) -> Tensor:
        """The first child of each row's node that holds the token: node index [B], -1 if there is none."""
        return _first((self.parents_BN == node_B[:, None]) & (self.tokens_BN == token_B[:, None]))

    def child(self, node_B: Tensor, rank: int) -> Tensor:
        """The `rank`-th child of each row's node: node index [B], -1 if there is none."""
        return _first((self.parents_BN == node_B[:, None]) & (self.ranks_BN == rank))

    def tokens_at(self, node_B: Tensor) -> Tensor:
        """Tokens of one node a row [B]; -1 for node -1."""
        return self.tokens_BN.gather(1, node_B.clamp(min=0)[:, None])[:, 0].where(node_B >= 0, -1)

    def draft_law_at(self, node_B: Tensor) -> Tensor:
        """q [B, V]: the law that the children of each row's node were drawn from. Needs a Dense law."""
        if not isinstance(self.law, Dense):
            raise TypeError("drafts chosen without sampling have no [B, V] law")
        rows_B = torch.arange(node_B.shape[0], device=node_B.device)
        return self.law.probs_RV[rows_B, node_B.clamp(max=self.law.probs_RV.shape[1] - 1)]


def _first(found_BN: Tensor) -> Tensor:
    """Index of the first True of each row, -1 for none."""
    return found_BN.to(torch.int8).argmax(1).where(found_BN.any(1), -1)


def draw_siblings(
    law_BV: Tensor, width: int, replacement: bool, chooser: Chooser, depth: int, trial: int, live_B: Tensor
) -> Tensor:
    """Sample `width` draft tokens for one node of each row, in order: int64 [B, W], -1 for rows not in `live_B`.

    Without replacement, -1 stands where the law has no token left. `depth` and `trial` number the draws of a round as
    in Chooser.draft; trials `trial` .. `trial + width - 1` are used. Whether a row is live, or a drawn token is kept,
    may depend on the node's ancestors only, never on the draw itself: dropping unlikely draws changes the target's law.
    """
    drawn = []
    for sibling in range(width):
        live_B = live_B & (law_BV.sum(-1) > 0)
        token_B = chooser.draft(Dense(law_BV), depth, trial + sibling, live_B).where(live_B, -1)
        drawn.append(token_B)
        if not replacement:
            law_BV = without_token(law_BV, token_B)
    return torch.stack(drawn, 1)
