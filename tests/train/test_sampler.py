"""The order of the data: every row once an epoch, within the budget, the same whatever the number of processes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from train.sampler import Window, in_chunks, plan, shares

LENGTHS = [random.Random(1).randint(5, 90) for _ in range(50)]
ROWS = [row for row in range(50) if row % 7]


def steps(**changes: int | None) -> list[Window]:
    settings = {"batch_tokens": 200, "epochs": 3, "max_steps": None, "seed": 11} | changes
    return plan(ROWS, LENGTHS, **settings)


def test_every_row_once_an_epoch_within_the_budget():
    windows = steps()
    assert [window.step for window in windows] == list(range(1, len(windows) + 1))
    orders = [[row for window in windows if window.epoch == epoch for row in window.rows] for epoch in range(3)]
    for order in orders:
        assert sorted(order) == ROWS
    assert orders[0] != orders[1]
    assert all(sum(LENGTHS[row] for row in window.rows) <= 200 for window in windows)
    # Full windows: the next row would not have fitted.
    for first, second in pairwise(windows):
        if first.epoch == second.epoch:
            assert sum(LENGTHS[row] for row in first.rows) + LENGTHS[second.rows[0]] > 200


def test_same_seed_same_plan_and_max_steps_cuts_it():
    assert steps() == steps()
    assert steps(seed=12) != steps()
    assert steps(max_steps=4) == steps()[:4]
    assert steps(epochs=1) == [window for window in steps() if window.epoch == 0]


def test_a_row_longer_than_a_window_has_its_own():
    windows = plan([0, 1, 2], [10, 500, 10], batch_tokens=40, epochs=1, max_steps=None, seed=0)
    assert (1,) in [window.rows for window in windows]
    assert sorted(row for window in windows for row in window.rows) == [0, 1, 2]


@pytest.mark.parametrize("parts", [1, 2, 3, 64])
def test_shares_split_a_window_evenly(parts: int):
    dealt = shares(ROWS, LENGTHS, parts)
    assert len(dealt) == parts
    assert sorted(row for part in dealt for row in part) == ROWS
    loads = [sum(LENGTHS[row] for row in part) for part in dealt]
    if parts <= 3:
        assert max(loads) - min(loads) <= max(LENGTHS)


def test_chunks_keep_order_and_budget():
    chunks = in_chunks(ROWS, LENGTHS, 150)
    assert [row for chunk in chunks for row in chunk] == ROWS
    assert all(sum(LENGTHS[row] for row in chunk) <= 150 for chunk in chunks)
    assert in_chunks([0, 1], [500, 3], 10) == [[0], [1]]
