"""Draft trees against brute force: masks, positions, paths and children by following parents one node at a time."""

from __future__ import annotations

import random

import pytest
import torch

from eval.law import Dense, PointMass
from eval.tree import PADDING, ROOT, DraftTree, TreeShape, draw_siblings
from heads.errors import HeadwayError


def random_rows(seed: int, rows: int, most: int) -> list[list[tuple[int, int]]]:
    source = random.Random(seed)
    return [
        [(source.randrange(5), source.randrange(node + 1)) for node in range(source.randrange(most + 1))]
        for _ in range(rows)
    ]


def lineage(parents: list[int], node: int) -> list[int]:
    """Root to node, by hand."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("seed", range(5))
def test_mask_positions_and_paths_follow_the_parents(seed: int) -> None:
    rows = random_rows(seed, rows=6, most=9)
    tree = DraftTree.from_lists(torch.arange(6), rows)
    mask_BNN, depth_BN, paths_BNL = tree.mask(), tree.positions(), tree.paths()
    assert tree.counts_B.tolist() == [len(row) for row in rows]
    for row in range(6):
        parents = tree.parents_BN[row].tolist()
        assert parents[0] == ROOT
        for node in range(tree.nodes):
            if parents[node] == PADDING:
                assert mask_BNN[row, node].nonzero()[:, 0].tolist() == [node]
                assert int(depth_BN[row, node]) == 0
                assert (paths_BNL[row, node] == -1).all()
                continue
            path = lineage(parents, node)
            assert mask_BNN[row, node].nonzero()[:, 0].tolist() == sorted(path)
            assert int(depth_BN[row, node]) == len(path) - 1 <= tree.max_depth
            assert [index for index in paths_BNL[row, node].tolist() if index >= 0] == path


@pytest.mark.parametrize("seed", range(5))
def test_children_are_found_by_rank_and_by_token(seed: int) -> None:
    rows = random_rows(seed, rows=6, most=9)
    tree = DraftTree.from_lists(torch.zeros(6, dtype=torch.int64), rows)
    for node in range(tree.nodes):
        at_B = torch.full((6,), node)
        for rank in range(tree.max_width + 1):
            found = tree.child(at_B, rank).tolist()
            for row, pairs in enumerate(rows):
                children = [index for index, (_, parent) in enumerate(pairs, start=1) if parent == node]
                assert found[row] == (children[rank] if rank < len(children) else -1)
                assert len(children) <= tree.max_width
        for token in range(5):
            found = tree.child_with(at_B, torch.full((6,), token)).tolist()
            for row, pairs in enumerate(rows):
                holders = [i for i, (held, parent) in enumerate(pairs, start=1) if parent == node and held == token]
                assert found[row] == (holders[0] if holders else -1)


def test_a_ragged_chain_pads_behind_its_drafts() -> None:
    tree = DraftTree.chain(torch.tensor([9, 8, 7]), torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([2, 0, 1]))
    assert tree.tokens_BN.tolist() == [[9, 1, 2], [8, 3, 4], [7, 5, 6]]
    assert tree.parents_BN.tolist() == [[-1, 0, 1], [-1, -2, -2], [-1, 0, -2]]
    assert tree.positions().tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]
    assert tree.valid_BN.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert isinstance(tree.law, PointMass)


def test_no_draft_is_the_root_alone() -> None:
    for tree in (
        DraftTree.root_only(torch.tensor([4, 2])),
        DraftTree.chain(torch.tensor([4, 2]), torch.zeros(2, 0, dtype=torch.int64)),
        DraftTree.from_lists(torch.tensor([4, 2]), [[], []]),
    ):
        assert (tree.nodes, tree.max_depth, tree.max_width) == (1, 0, 0)
        assert tree.mask().tolist() == [[[True]], [[True]]]
        assert tree.counts_B.tolist() == [0, 0]


def test_a_static_shape_sorts_its_paths() -> None:
    shape = TreeShape.of([[0, 1], [1], [0], [0, 0], [0, 1, 0]])
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (0, 1, 0))
    assert shape.parents == [-1, 0, 0, 1, 1, 4]
    assert (shape.depths, shape.ranks) == ([1, 1, 2, 2, 3], [0, 1, 0, 1, 0])
    assert (shape.max_depth, shape.max_width) == (3, 2)
    tree = DraftTree.static(torch.tensor([7]), torch.arange(5)[None], shape)
    assert tree.tokens_BN.tolist() == [[7, 0, 1, 2, 3, 4]]
    assert tree.paths()[0, 5].tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("paths", [[[0], [0]], [[0, 0]], [[]], [[-1]]])
def test_a_shape_that_is_no_tree_is_refused(paths: list[list[int]]) -> None:
    with pytest.raises(HeadwayError, match="tree shape"):
        TreeShape.of(paths)


@pytest.mark.parametrize("parent", [1, 2, -1])
def test_a_parent_behind_its_child_is_refused(parent: int) -> None:
    with pytest.raises(HeadwayError, match="row 1 node 1"):
        DraftTree.from_lists(torch.zeros(2, dtype=torch.int64), [[(3, 0)], [(3, parent)]])


class Likeliest:
    """A chooser that draws the likeliest token and notes which draws it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def draft(self, law: Dense, depth: int, trial: int, live_B: torch.Tensor) -> torch.Tensor:
        self.asked.append((depth, trial))
        return law.probs_RV.argmax(-1)


def test_siblings_without_replacement_differ_and_run_out() -> None:
    law_BV = torch.tensor([[0.1, 0.6, 0.3], [1.0, 0.0, 0.0], [0.2, 0.2, 0.6]])
    live_B = torch.tensor([True, True, False])
    chooser = Likeliest()
    drawn_BW = draw_siblings(law_BV, 3, False, chooser, depth=2, trial=4, live_B=live_B)  # type: ignore[arg-type]
    assert drawn_BW.tolist() == [[1, 2, 0], [0, -1, -1], [-1, -1, -1]]
    assert chooser.asked == [(2, 4), (2, 5), (2, 6)]
    drawn_BW = draw_siblings(law_BV, 2, True, chooser, depth=0, trial=0, live_B=live_B)  # type: ignore[arg-type]
    assert drawn_BW.tolist() == [[1, 1], [0, 0], [-1, -1]]


def test_a_law_is_looked_up_at_the_parent() -> None:
    law_BKV = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]])
    tree = DraftTree.chain(torch.tensor([0]), torch.tensor([[1, 0]]), law_BKV=law_BKV)
    assert tree.draft_law_at(torch.tensor([1])).tolist() == law_BKV[:, 1].tolist()
    with pytest.raises(TypeError, match="without sampling"):
        DraftTree.root_only(torch.tensor([0])).draft_law_at(torch.tensor([0]))
