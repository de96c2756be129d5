"""The plan before the work: counted by hand, timed by a clock that the test sets, and what a real run then writes."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import forecast as module
from data_prep.collect import collect, main
from data_prep.forecast import coverage, describe_coverage, disk_space, given, pilot
from data_prep.store import FeatureStore, read_manifest
from heads.errors import HeadwayError
from heads.target import Target
from tests.data_prep.collecting import Make


@pytest.fixture
def settings(collection: Make) -> Make:
    """Settings of a dry run into tmp_path/store; keywords override."""
    usual = {"batch_tokens": 200, "shard_tokens": 16384, "store_dtype": "bfloat16", "dry_run": True}
    return lambda **changes: collection(**(usual | changes))


def test_a_dry_run_says_what_a_run_then_does(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collect(settings())
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "dry run, nothing was written" in said
    collect(settings(dry_run=False))
    totals = read_manifest(tmp_path / "store")["totals"]
    assert f"{totals['tokens']:,} tokens, {totals['supervised_tokens']:,} supervised" in said
    written = sum(path.stat().st_size for path in (tmp_path / "store").glob("*.safetensors"))
    announced = float(said.split(" MB to write")[0].split()[-1]) * 1e6
    assert announced == pytest.approx(written, rel=0.1, abs=1e5)
    supervised: Counter[int] = Counter()
    for row in FeatureStore.open(tmp_path / "store"):
        supervised.update(row.ids_T[row.turn_T > 0].tolist())
    half = 2 ** (len(supervised) - 1).bit_length() // 2
    share = sum(count for _, count in supervised.most_common(half)) / supervised.total()
    assert f"{half:,}: {share:.1%}, {len(supervised):,}: 100.0%" in said


def test_a_dry_run_of_what_is_left(settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collect(settings(dry_run=False))
    capsys.readouterr()
    collect(settings(tokens_per_second=10.0))
    assert "complete, nothing to do" in capsys.readouterr().out
    tokens = read_manifest(tmp_path / "store")["totals"]["tokens"]
    shutil.rmtree(tmp_path / "store")
    collect(settings(tokens_per_second=10.0))
    assert f"{tokens / 36_000:,.2f} hours at 10 tokens/s (as given)" in capsys.readouterr().out


def test_the_command_line(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings()
    command = ["collect.py", "--conversations", str(given.conversations), "--target", given.target, "--out"]
    monkeypatch.setattr("sys.argv", [*command, str(given.out), "--held_out", "4", "--dtype", "float32", "--dry_run"])
    main()
    assert "timed now on" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_known_speed_loads_no_weights(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Target:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(Target, "load", refuse)
    collect(settings(tokens_per_second=500.0))
    with pytest.raises(AssertionError, match="weights"):
        collect(settings())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens_per_second": 0.0}, "--tokens_per_second 0.0"),
        ({"tokens_per_second": 5.0, "dry_run": False}, "is for a --dry_run"),
    ],
)
def test_bad_speeds(settings: Make, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        collect(settings(**changes))


def test_a_pilot_weighs_batches_by_the_tokens_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight batches of 10 rows; a token of batch n takes n + 1 seconds: those of batches 4, 1 and 7 are 5, 2 and 8."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "PILOT_SECONDS", 1e9)
    batches = [[(number, row) for row in range(10)] for number in range(8)]
    run_on: list[tuple[int, int]] = []

    def run(batch: Sequence[tuple[int, int]]) -> int:
        number, count = batch[0][0], len(batch)
        run_on.append((number, count))
        now[0] += (number + 1) * 3 * count
        return 3 * count

    speed = pilot(batches, run)
    assert run_on == [(0, 1), (4, 10), (1, 10), (7, 10)]
    assert speed.tokens_per_second == pytest.approx(3 / (5 + 2 + 8))
    assert speed.origin == "timed now on 90 tokens in 3 batches"
    assert speed.hours(7200) == "10.00 hours at 0 tokens/s (timed now on 90 tokens in 3 batches)"
    run_on.clear()
    monkeypatch.setattr(module, "PILOT_SECONDS", 100.0)
    assert pilot(batches, run).tokens_per_second == pytest.approx(1 / 5)  # the first batch took 150 s
    assert pilot(batches[:1], run).tokens_per_second == pytest.approx(1)


def test_hours_of_several_processes() -> None:
    assert given(50.0).hours(3_600_000, 4) == (
        "5.00 hours at 50 tokens/s (as given, 4 processes that are each as fast)"
    )


def test_coverage_by_counting() -> None:
    tokens = list(itertools.chain.from_iterable([number] * (37 * number % 101) for number in range(300)))
    counts_V = torch.bincount(torch.tensor(tokens), minlength=400)
    seen = Counter(tokens)
    shares = coverage(counts_V)
    assert list(shares) == [8, 16, 32, 64, 128, 256, len(seen)]
    assert len(seen) == 297
    for size, share in shares.items():
        assert share == pytest.approx(sum(count for _, count in seen.most_common(size)) / len(tokens))
    assert coverage(torch.tensor([0, 3, 0])) == {1: 1.0}
    assert coverage(torch.tensor([1, 3])) == {1: 0.75, 2: 1.0}
    assert describe_coverage(torch.tensor([1, 3])).endswith("cover: 1: 75.0%, 2: 100.0%")


def test_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 5_000_000))  # type: ignore[attr-defined]
    assert disk_space(tmp_path / "not" / "yet", 5_000_000, "free some") == "5.0 MB to write, 5.0 MB free"
    with pytest.raises(HeadwayError, match=r"yet: 5\.2 MB are to be written and 5\.0 MB are free; free some"):
        disk_space(tmp_path / "not" / "yet", 5_200_000, "free some")
