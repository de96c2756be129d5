"""The run log with the real wandb, offline: what a stand-in for wandb cannot tell."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from train.logs import METRICS, RunLog
from train.recipe import Log


def test_real_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = RunLog(tmp_path, Log(wandb="offline"), {"seed": 0}, run_id="abc123", start=0, total=1, main=True)
    row = {"step": 1, "loss": 2.5, "tau": 1.25, "tokens_per_s": 10.0, "accuracy": [0.5]}
    log.step(row, 0.0)
    log.close()
    assert [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()] == [{"kind": "train", **row}]
    (kept,) = tmp_path.rglob("run-abc123.wandb")
    deadline = time.monotonic() + 20  # a process of wandb's own writes it, at times after `finish` returned
    while b"train/loss" not in kept.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
