"""Dynamic trees against a construction by hand: lists, sorting, and the paths' tokens."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from eval.decode import Settings, decode
from eval.drafters.dynamic_tree import DynamicTreeDrafter, TreeSize, grow_dynamic
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError
from tests.eval.eagle_heads import SMALL, PlainForward, functions, make_head, random_prompts, small_target

Path_ = tuple[int, ...]


class Laws:
    """Random draft logits behind every path of target ids, in each row its own; `rough` ones tie often."""

    def __init__(self, rows: int, width: int, rough: bool) -> None:
        self.rows, self.width, self.rough = rows, width, rough
        self.target_ids_D = torch.arange(width) * 2 + 3

    def of(self, row: int, path: Path_) -> torch.Tensor:
        source = random.Random(repr((row, path)))
        values = [source.gauss(0, 2) for _ in range(self.width)]
        if self.rough:
            # one certain token, so that children score exactly as their parents, or all alike but told apart by nothing
            values = (
                [0.0] * self.width if source.random() < 0.3 else [1000.0, *[-1000.0 - i for i in range(1, self.width)]]
            )
        return torch.tensor(values, dtype=torch.float64)

    def score(self, row: int, path: Path_) -> float:
        """The log of the path's probability, summed from the root on."""
        steps = enumerate(path)
        return sum(float(self.of(row, path[:i]).log_softmax(-1)[(token - 3) // 2]) for i, token in steps)


def grown(laws: Laws, size: TreeSize) -> DraftTree:
    """The tree that the code grows; its `expand` keeps every expanded node's path."""
    paths: list[list[Path_]] = [[()] for _ in range(laws.rows)]

    def expand(token_BK: torch.Tensor, above_BK: torch.Tensor, depth: int) -> torch.Tensor:
        nonlocal paths
        pairs = zip(token_BK.tolist(), above_BK.tolist(), strict=True)
        paths = [
            [(*paths[row][above], token) for token, above in zip(tokens, parents, strict=True)]
            for row, (tokens, parents) in enumerate(pairs)
        ]
        assert all(len(path) == depth for row in paths for path in row)
        return torch.stack([torch.stack([laws.of(row, path) for path in paths[row]]) for row in range(laws.rows)])

    first_BD = torch.stack([laws.of(row, ()) for row in range(laws.rows)])
    return grow_dynamic(torch.arange(laws.rows), first_BD, expand, size, laws.target_ids_D)


def by_hand(laws: Laws, row: int, size: TreeSize) -> list[Path_]:
    """The kept paths, best first. The pool is in order of depth, parent's place on its level and rank."""
    pool: list[tuple[float, Path_]] = []
    level: list[tuple[float, Path_]] = [(0.0, ())]
    for _ in range(size.depth):
        candidates = []
        for score, path in level:
            log_D = laws.of(row, path).log_softmax(-1)
            best = sorted(range(laws.width), key=lambda draft: -log_D[draft])[: size.k]
            candidates += [(score + float(log_D[draft]), (*path, int(laws.target_ids_D[draft]))) for draft in best]
        pool += candidates
        level = sorted(candidates, key=lambda item: -item[0])[: size.k]
    return [path for _, path in sorted(pool, key=lambda item: -item[0])[: size.total - 1]]


def paths_of(tree: DraftTree, row: int) -> list[Path_]:
    """Every real node's tokens from the root's child on, in the order of the nodes."""
    tokens, parents = tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()
    found: list[Path_] = [()]
    for node in range(1, tree.nodes):
        if parents[node] >= 0:
            assert parents[node] < node
            found.append((*found[parents[node]], tokens[node]))
    return found[1:]


@pytest.mark.parametrize(
    "size", [TreeSize(3, 12, 4), TreeSize(10, 60, 6), TreeSize(2, 40, 3), TreeSize(4, 2, 3), TreeSize(2, 9, 1)]
)
def test_growth_equals_the_construction_by_hand(size: TreeSize) -> None:
    laws = Laws(3, 7, rough=False)
    tree = grown(laws, size)
    for row in range(3):
        paths = by_hand(laws, row, size)
        assert paths_of(tree, row) == paths
        assert max(map(len, paths)) <= tree.max_depth <= size.depth
    assert tree.tokens_BN[:, 0].tolist() == [0, 1, 2]


def test_ties_keep_the_tree_connected() -> None:
    """Certain tokens: children that score as their parents. A shallower node comes first, then the one that stands first."""
    laws, size = Laws(6, 5, rough=True), TreeSize(3, 10, 5)
    tree = grown(laws, size)
    for row in range(6):
        paths = paths_of(tree, row)
        assert {path[:-1] for path in paths} <= {(), *paths}
        assert len(set(paths)) == len(paths) == 9
        scores = [laws.score(row, path) for path in paths]
        assert scores == sorted(scores, reverse=True)
        for one, other in itertools.pairwise(paths):
            assert laws.score(row, one) > laws.score(row, other) or len(one) <= len(other)


@pytest.mark.parametrize("kind", ["eagle", "eagle3.1"])
def test_the_drafter_scores_by_the_heads_law(tmp_path: Path, kind: str) -> None:
    """Each round's tree is the construction by hand over laws of plain passes without a cache; ragged batch, any temperature."""
    target = small_target(tmp_path)
    head, size, prompts = make_head(kind, target), TreeSize(2, 7, 3), random_prompts(SMALL, (3, 9))
    drafter, alone = DynamicTreeDrafter(head, functions(target), size), PlainForward(head, target)
    assert (drafter.most_drafts, drafter.depth) == (6, 3)
    draft, checked = drafter.draft, 0

    def compared(sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        nonlocal checked
        tree = draft(sequences, root_B, length)
        for row, ids in enumerate(sequences):
            if len(ids) < len(prompts[row]) + 8:

                class Behind(Laws):
                    def of(self, row: int, path: Path_, ids: list[int] = ids) -> torch.Tensor:
                        return alone(ids, list(path))

                laws = Behind(1, len(head.target_ids()), rough=False)
                laws.target_ids_D = head.target_ids()
                assert paths_of(tree, row) == by_hand(laws, 0, size)
                checked += 1
        return tree

    drafter.draft = compared  # type: ignore[method-assign]
    decode(target, drafter, prompts, Settings(8, sampling=Sampling(temperature=1.0), stop_ids=()))
    assert checked >= 4


def test_sizes_out_of_range() -> None:
    for size, message in (((0, 5, 2), "k 0; it must be at least 1"), ((2, 1, 2), "total 1"), ((2, 5, 0), "depth 0")):
        with pytest.raises(HeadwayError, match=message):
            TreeSize(*size)
