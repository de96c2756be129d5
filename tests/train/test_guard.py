"""The guard before each backward: what it takes for a spike, and a run that it stops and that goes on from its checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.store import FeatureStore, StoredConversation
from heads.errors import HeadwayError
from tests.train.conftest import Run, metrics, weights
from train.guard import ENOUGH, HISTORY, LossGuard
from train.sampler import Window, plan, shares, split_rows
from train.steps import Steps


def after(losses: list[float], spike: float | None = 3.0) -> LossGuard:
    guard = LossGuard(spike)
    for loss in losses:
        assert guard.fault([loss]) is None
        guard.done(True)
    return guard


def test_a_spike_is_a_step_above_a_multiple_of_the_median_wherever_its_parts_lie():
    losses = [1.0, 9.0, 2.0, 2.5, 2.0, 1.5, 2.0, 3.0, 2.0, 2.0]  # the median is 2: 9 comes before there are enough
    assert after(losses).fault([6.0]) is None
    assert after(losses).fault([6.1]) == (0, "the loss is 6.1, more than 3 times the median 2 of the last steps")
    whole = after(losses)
    assert whole.fault([2.0, 1.0]) is None
    assert whole.fault([0.1, 3.0]) == (1, "the loss is 6.1, more than 3 times the median 2 of the last steps")
    next_step = after(losses)
    assert next_step.fault([5.0]) is None
    next_step.done(True)
    assert next_step.fault([5.0]) is None  # sums begin anew with a step


def test_what_is_not_finite_is_refused_at_once_and_without_a_limit():
    assert LossGuard(None).fault([1.0, math.nan]) == (1, "the loss is nan")
    assert LossGuard(3.0).fault([-math.inf, 1.0]) == (0, "the loss is -inf")
    assert after([1.0] * 20, spike=None).fault([1e30]) is None


def test_it_waits_for_enough_losses_and_forgets_old_and_unsupervised_ones():
    assert after([1.0] * (ENOUGH - 1)).fault([100.0]) is None
    assert after([1.0] * ENOUGH).fault([100.0]) is not None
    guard = after([1.0] * ENOUGH)
    guard.fault([0.0])
    guard.done(False)
    assert guard.recent == [1.0] * ENOUGH
    long = after([1.0] * HISTORY + [2.0] * HISTORY)
    assert long.recent == [2.0] * HISTORY
    assert LossGuard(3.0, long.recent).fault([6.1]) is not None


@pytest.mark.parametrize(
    ("factor", "what"),
    [(math.nan, "the loss is nan"), (1e3, r"the loss is [\d.]+, more than 3 times the median [\d.]+")],
)
def test_a_run_stops_before_the_batch_names_it_and_goes_on_as_if_nothing_had_been(
    run: Run, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, what: str
):
    """States of one conversation spoiled in step 11, in the second of its two passes: the conversations of that pass are named."""
    store = FeatureStore.open(features)
    windows = plan(split_rows(store, 6)[0], store.lengths, batch_tokens=400, epochs=3, max_steps=None, seed=3)
    part = shares(windows[10].rows, store.lengths, 2)[1]
    options = ("--optim.batch_tokens=400", "--optim.accumulation=2")
    expected = run(*options, out="expected")

    spoiled = False
    step, read = Steps.train_step, FeatureStore.__getitem__

    def spoiling_step(self: Steps, window: Window) -> dict[str, Any]:
        nonlocal spoiled
        spoiled = window.step == 11
        return step(self, window)

    def spoiling_read(self: FeatureStore, row: int) -> StoredConversation:
        stored = read(self, row)
        return replace(stored, last_TH=stored.last_TH * factor) if spoiled and row == part[0] else stored

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "train_step", spoiling_step)
        patch.setattr(FeatureStore, "__getitem__", spoiling_read)
        ids = ", ".join(store.conversation_ids[row] for row in part)
        with pytest.raises(
            HeadwayError, match=rf"{what}.* at step 11, in the batch of the conversations {ids}; it was not"
        ):
            run(*options, "--optim.spike=3.0")
    assert metrics(tmp_path / "head", "train")[-1]["step"] == 10
    assert max(path.name for path in (tmp_path / "head" / "checkpoints").glob("step-*")) == "step-000009"
    resumed = run(*options, "--optim.spike=null")  # what is refused may change: weights do not depend on it
    assert weights(resumed) == weights(expected)
