"""The pilot: its curve on points of a known law, the sizes of its shares, and what it says on a small store."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from data_prep.store import FeatureStore
from heads.errors import HeadwayError
from tests.train.conftest import Run
from train import pilot
from train.pilot import Point, forecast, share_sizes
from train.sampler import split_rows


def law(tokens: int) -> float:
    return 2.8 - 1.3 * (tokens / 1000) ** -0.4


def test_points_on_the_law_give_it_back():
    points = [Point(1000 * 2**i, law(1000 * 2**i), 0.001) for i in range(6)]
    found = forecast(points, 1_000_000, most=5.0)
    assert found.tau == pytest.approx(law(1_000_000), abs=1e-3)
    assert found.limit == pytest.approx(2.8, abs=1e-3)
    assert found.low < found.tau < found.high < found.low + 0.2


@pytest.mark.parametrize("misjudged", [1.0, 0.25], ids=["errors as they are", "errors a quarter of what they are"])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(misjudged: float):
    """95 % of noisy pilots, read 10 times further; with errors that are too small the misfit widens it."""
    source, held, off, halves = np.random.default_rng(3), 0, [], []
    for _ in range(60):
        noise = source.normal(0, 0.02, 6)
        points = [Point(1000 * 2**i, law(1000 * 2**i) + noise[i], 0.02 * misjudged) for i in range(6)]
        found = forecast(points, 320_000, most=5.0)
        held += found.low <= law(320_000) <= found.high
        off.append(found.tau - law(320_000))
        halves.append((found.high - found.low) / 2)
    assert held >= 54
    assert abs(float(np.median(off))) < 0.03
    if misjudged == 1.0:  # three degrees of freedom: 3.18 standard deviations
        assert float(np.median(halves)) == pytest.approx(3.18 * float(np.std(off)), rel=0.4)


def test_tau_stays_between_one_and_the_most_a_head_can_give():
    rising = [Point(1000 * 2**i, 1.2 + 0.3 * i, 0.01) for i in range(4)]
    found = forecast(rising, 10**9, most=3.0)
    assert (found.low >= 1.0, found.high) == (True, 3.0)
    flat = [Point(1000 * 2**i, 1.5, 0.01) for i in range(5)]
    assert forecast(flat, 10**6, most=3.0).tau == pytest.approx(1.5, abs=0.02)


def test_shares_double_within_the_budget_and_half_of_the_whole():
    assert share_sizes(6300, 100, 10**6) == [100, 200, 400, 800, 1600, 3200]
    assert share_sizes(6299, 100, 10**6) == [203 * 2**i for i in range(5)]
    assert share_sizes(10**9, 100, 64_000) == [1000 * 2**i for i in range(6)]
    assert share_sizes(1499, 100, 10**6) == []
    assert share_sizes(10**9, 100, 1599) == []


def test_a_pilot_trains_on_growing_shares_and_says_that_it_extrapolates(
    run: Run, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    store = FeatureStore.open(features)
    whole = sum(store.lengths[row] for row in split_rows(store, 6)[0])
    monkeypatch.setattr(pilot, "timed", lambda steps: (1e6, 0.0))  # a fast machine: the store alone limits the shares
    before = sorted(tmp_path.rglob("*"))
    run("--pilot=1000", "--optim.batch_tokens=20")
    assert sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().out
    shares = [
        int(tokens.replace(",", "")) for tokens in re.findall(r"pilot: ([\d,]+) tokens, replayed tau [\d.]+ \+-", said)
    ]
    assert len(shares) >= 4
    sizes = [int(whole / 2 ** len(shares)) * 2**i for i in range(len(shares))]
    for share, size in zip(shares, sizes, strict=True):
        assert size <= share < size + max(store.lengths)
    times, tokens, tau, low, high = re.search(
        r"extrapolated ([\d.]+) times beyond the largest share, to all ([\d,]+) tokens: "
        r"replayed tau ([\d.]+) \[([\d.]+), ([\d.]+)\]",
        said,
    ).groups()
    assert int(tokens.replace(",", "")) == whole
    assert float(times) == pytest.approx(whole / shares[-1], abs=0.06)
    assert 1 <= float(low) <= float(tau) <= float(high) <= 4
    assert "not a measurement; nothing was written" in said


def test_too_few_minutes_and_steps_that_are_no_epochs_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pilot, "timed", lambda steps: (10.0, 0.0))
    with pytest.raises(
        HeadwayError, match=r"pilot is 60.0 minutes; at 10 tokens/s the fewest shares take 307.2 minutes"
    ):
        run("--pilot=60")
    with pytest.raises(HeadwayError, match=r"optim\.max_steps goes with no pilot"):
        run("--pilot=60", "--optim.max_steps=5")
