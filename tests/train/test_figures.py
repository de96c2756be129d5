"""Figures from sums: worked examples."""

from __future__ import annotations

import pytest
import torch

from heads.losses import HeadOutput
from train.figures import Totals, simulated_tau
from train.steps import learning_rate


def output(*rows: list[int]) -> HeadOutput:
    return HeadOutput(*(torch.tensor(row) for row in rows))


def test_totals_are_sums_then_ratios():
    totals = Totals(2, torch.device("cpu"))
    totals.add(output([6, 4], [3, 1], [4, 3], [2, 1], [4, 2], [2, 1]))
    totals.add(output([0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]))
    totals.add(output([2, 2], [1, 2], [4, 2], [4, 1], [4, 4], [4, 1]))
    figures = totals.figures((1.0, 0.5))
    assert figures["losses"] == [8 / 4, 6 / 3]
    assert figures["loss"] == 2 + 0.5 * 2
    assert figures["accuracy"] == [6 / 8, 2 / 5]
    assert figures["conditional"] == [6 / 8, 2 / 6]
    assert figures["tau"] == pytest.approx(1 + 0.75 + 0.75 / 3)
    assert figures["rows"] == [8, 5]
    assert figures["rows_in_draft_vocabulary"] == [4, 3]


def test_nothing_counted_is_zero_not_nan():
    figures = Totals(2, torch.device("cpu")).figures((1.0, 1.0))
    assert figures["loss"] == 0.0
    assert figures["tau"] == 1.0


def test_simulated_tau_of_a_constant_acceptance():
    """The closed form of metrics.md: (1 - a^(g+1)) / (1 - a), 3.36 at a = 0.8 and g = 4."""
    assert simulated_tau([0.8] * 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert round(simulated_tau([0.8] * 4), 2) == 3.36


def test_learning_rate_rises_then_follows_half_a_cosine():
    rates = [learning_rate(step, 10, 2.0, 0.2) for step in range(1, 11)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.0)  # half-way down: 4 of 8 steps
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.1
    assert learning_rate(1, 1, 2.0, 0.0) == 2.0
