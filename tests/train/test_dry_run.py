"""What a dry run says of a run, counted apart; and that it leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from data_prep.store import FeatureStore
from heads import load_head
from tests.train.conftest import Run, metrics, weights
from train.dry_run import peak_beyond
from train.memory import Sharding, head_memory


def test_it_says_what_the_run_then_is_and_writes_nothing(
    run: Run, features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = sorted(tmp_path.rglob("*"))
    run("--dry_run", "--head.output=shared")
    assert sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().out
    folder = run("--head.output=shared")
    head = load_head(folder)
    trained = sum(weight.numel() for name, weight in head.named_parameters() if not name.startswith("lm_head"))
    frozen = head.lm_head.weight.numel()
    assert f"parameters: {trained:,} trained, {frozen:,} frozen\n" in said
    by_part = {part: float(size) for part, size in re.findall(r"([a-z'() ]+) (\d+\.\d\d)[,\n]", said.split("MB: ")[1])}
    expected = {"weights": 4 * (trained + frozen), "gradients": 4 * trained, "optimizer": 8 * trained, "host memory": 0}
    for part, size in expected.items():
        found = next(value for name, value in by_part.items() if name.strip() == part)
        assert found == pytest.approx(size / 1e6, abs=0.006), part
    assert "activations and batches (measured)" in said
    store, rows = FeatureStore.open(features), metrics(folder, "train")
    tokens = sum(row["tokens"] for row in rows)
    assert f"steps: {len(rows)} in 3 epoch(s), {tokens:,} tokens\n" in said
    assert f"store: {store.manifest['totals']['bytes'] / 1e6:,.2f} MB on disk" in said
    assert re.search(r"time: [\d.]+ minutes; [\d,]+ tokens/s in 3 timed steps, \d validation\(s\) of", said)
    assert f"loss {rows[0]['loss']:.3f} at step 1" in said
    assert said.endswith("dry run: nothing was written\n")


def test_a_run_after_a_dry_run_is_the_same(run: Run):
    run("--dry_run")
    assert weights(run()) == weights(run(out="other"))


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (Sharding(processes=4), (4400, 4000, 8000, 0)),
        (Sharding(1, 4), (4400, 4000, 2000, 0)),
        (Sharding(2, 4), (4400, 1000, 2000, 0)),
        (Sharding(3, 4), (1100, 1000, 2000, 0)),
        (Sharding(3, 4, narrow=True), (550, 500, 3000, 0)),
        (Sharding(2, 4, narrow=True, optimizer_on_host=True), (2200, 500, 0, 3000)),
        (Sharding(3, 4, narrow=True, optimizer_on_host=True, weights_on_host=True), (0, 500, 0, 3550)),
    ],
    ids=["ddp", "zero1", "zero2", "zero3", "zero3-bf16", "zero2-offload", "zero3-offload"],
)
def test_memory_of_each_process(sharding: Sharding, expected: tuple[int, ...]):
    """1,000 trained and 100 frozen parameters under AdamW, which keeps two values of each; in bf16 a copy in fp32 too."""
    assert tuple(head_memory(1000, 100, 2, sharding).values()) == expected


def test_the_peak_is_what_was_allocated():
    size = 64 * 2**20
    measured = peak_beyond(torch.device("cpu"), lambda: torch.ones(size // 4).sum())
    assert measured == pytest.approx(size, rel=0.1)
