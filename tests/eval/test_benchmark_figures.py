"""What the benchmark scripts make of their measurements, and what they write down."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tap_formats, train_speed
from benchmarks.compare_heads import differing
from benchmarks.results_file import write_result
from eval.ledger import Ledger, Round


def ledger(*emitted: list[int]) -> Ledger:
    """A prompt for each list, a round for each number."""
    rows = [
        Round(prompt, position, 4, count - 1, count, None, 0.0, 0.0, 0.0)
        for prompt, counts in enumerate(emitted)
        for position, count in enumerate(counts, start=1)
    ]
    return Ledger(rows, [])


def test_a_result_says_what_made_it(tmp_path: Path) -> None:
    content = json.loads(write_result("topic-name", {"tau": 1.5}, tmp_path).read_text())
    assert content["figures"] == {"tau": 1.5}
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert content["machine"]["instructions"] == torch.backends.cpu.get_cpu_capability()


def test_a_result_that_is_no_number_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result("topic-name", {"tau": float("nan")}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_ratio_of_two_heads_pools_the_rounds() -> None:
    found = tap_formats.ratio(ledger([1, 3], [2, 2, 2]), ledger([4], [3, 3]))
    assert found["ratio"] == pytest.approx((10 / 3) / (10 / 5))
    low, high = found["ci95"]  # resamples are of one conversation twice, or of both
    assert low == pytest.approx(3 / 2)
    assert high == pytest.approx(4 / 2)


def test_ratio_of_a_head_with_itself_has_no_width() -> None:
    one = ledger([1, 3, 2], [2, 2], [4, 1])
    assert tap_formats.ratio(one, one) == {"ratio": 1.0, "ci95": (1.0, 1.0)}


def test_ratio_wants_the_same_conversations() -> None:
    with pytest.raises(AssertionError, match="same conversations"):
        tap_formats.ratio(ledger([1], [2]), ledger([1]))


def test_recipes_differ_where_a_setting_is_another_or_missing() -> None:
    first = {"out": "a", "seed": 0, "head": {"start": "random", "steps": 4}, "optim": {"lr": 1e-3}}
    second = {"out": "b", "seed": 0, "head": {"start": "target", "steps": 4, "noise": 0.1}, "optim": {"lr": 1e-3}}
    assert differing(first, second) == {"head.start": ["random", "target"], "head.noise": [None, 0.1]}
    assert differing(first, first) == {}


def run(tokens: int, seconds: float, peak_mib: float) -> dict[str, Any]:
    return {"tokens": tokens, "steps": 2, "seconds": seconds, "peak_mib": peak_mib, "added_mib": peak_mib / 2}


def test_training_speeds_are_compared_round_by_round() -> None:
    runs = {
        "ours": [run(100, 1, 30), run(100, 2, 40), run(100, 4, 20)],
        "theirs": [run(80, 2, 80), run(80, 2, 60), run(80, 20, 80)],
    }
    found = train_speed.compared(runs)
    assert found["ours"]["tokens_per_s"] == 50
    assert found["ours"]["tokens_per_step"] == 50
    assert found["theirs"]["each_round"] == [40, 40, 4]
    assert found["speed_ratio"] == 2.5  # of 2.5, 1.25 and 6.25
    assert found["peak_ratio"] == 0.5
    assert found["added_ratio"] == 0.5


def test_a_size_that_did_not_fit_has_no_ratio() -> None:
    found = train_speed.compared({"ours": [run(100, 1, 30)], "theirs": [], "error": "out of memory"})
    assert found["error"] == "out of memory"
    assert "theirs" not in found
    assert "speed_ratio" not in found
