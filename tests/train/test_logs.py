"""The run log: the real wandb, offline, which tells what a stand-in cannot; and a stand-in, for keys and modes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Run, metrics
from train.logs import METRICS, RunLog
from train.recipe import Log


def test_real_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    settings = {"run_id": "abc123", "start": 0, "total": 1, "main": True, "replayed_tau": None}
    log = RunLog(tmp_path, Log(wandb="offline"), {"seed": 0}, **settings)
    row = {"step": 1, "loss": 2.5, "tau": 1.25, "tokens_per_s": 10.0, "accuracy": [0.5]}
    log.step(row, 0.0)
    log.close()
    assert [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()] == [{"kind": "train", **row}]
    (kept,) = tmp_path.rglob("run-abc123.wandb")
    deadline = time.monotonic() + 20  # a process of wandb's own writes it, at times after `finish` returned
    while b"train/loss" not in kept.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_wandb_is_offline_without_a_key_and_the_key_stays_out_of_the_files(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import wandb

    started: list[dict[str, Any]] = []

    class Recorder:
        def log(self, values: dict[str, float], step: int) -> None:
            started[-1].setdefault("rows", []).append((step, values))

        def finish(self) -> None:
            started[-1]["finished"] = True

    def init(**settings: Any) -> Recorder:
        started.append(settings)
        return Recorder()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    key = "0123456789" * 4
    for mode, logged_in, expected in [
        ("auto", False, "offline"),
        ("auto", True, "online"),
        ("offline", True, "offline"),
    ]:
        monkeypatch.setattr(wandb, "login", lambda logged_in=logged_in, **_: logged_in)
        monkeypatch.setenv("WANDB_API_KEY", key)
        out = f"{mode}-{logged_in}"
        folder = run(f"--log.wandb={mode}", "--optim.max_steps=4", out=out)
        assert started[-1]["mode"] == expected
        assert started[-1]["finished"]
        assert [step for step, _ in started[-1]["rows"]] == [1, 2, 3, 3, 4, 4]
        assert started[-1]["rows"][0][1]["train/accuracy_2"] == metrics(folder, "train")[0]["accuracy"][2]
        assert key not in str(started[-1]["config"])
        assert not [path for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    count = len(started)
    run("--log.wandb=off", "--optim.max_steps=2", out="off")
    assert len(started) == count
    assert key not in capsys.readouterr().out


def rows(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "tau": 1.25, "tokens_per_s": 1234.4, "accuracy": [0.5], "replayed_tau": 1.5}


def test_a_file_gets_a_line_a_step_and_a_terminal_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    settings: dict[str, Any] = {"run_id": "a", "start": 0, "total": 3, "main": True, "replayed_tau": None}
    log = RunLog(tmp_path, Log(wandb="off"), {}, **settings)
    log.step(rows(1), 20.0)
    log.validation(rows(1))
    log.step(rows(2), 10.2)
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 1/3  loss 2.500  replayed tau -  1,234 tokens/s  20 s left",
        "step 1/3  validation: replayed tau 1.500  accuracy by head 0.500",
        "step 2/3  loss 2.500  replayed tau 1.500  1,234 tokens/s  10 s left",
    ]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    log = RunLog(tmp_path, Log(wandb="off"), {}, **settings | {"start": 2, "replayed_tau": 1.75})
    log.step(rows(3), 0.0)
    log.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "3/3" in shown
    assert "loss 2.500  replayed tau 1.750  1,234 tokens/s" in shown
    assert "left 0:00:00" in shown
    assert "step 3/3  loss" not in shown
    others = RunLog(tmp_path / "none", Log(), {}, **settings | {"main": False})
    others.step(rows(1), 0.0)
    others.close()
    assert not (tmp_path / "none").exists()
