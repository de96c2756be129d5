"""A run's folder: killed at any moment and gone on with, finished, pruned, and of another run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from heads import load_head
from heads.errors import HeadwayError
from tests.train.conftest import Killed, Run, killed_after, metrics, weights
from train import loop, state, steps


def test_killed_at_any_moment_it_ends_with_the_same_weights(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Case 13. Die at the n-th of the moments below for n = 0, 1, 2, ..., again and again in one folder, until it finishes."""
    expected = run(out="uninterrupted")
    moments: list[tuple[Any, str]] = [
        (loop._Run, "train_step"),
        (steps.Steps, "validate"),
        (loop, "save_head"),
        (state.Accelerator, "save_state"),
        (state, "_sync_tree"),
        (state.os, "replace"),
        (state.RunFolder, "prune"),
        (state, "save_head"),
    ]
    passed, fatal, deaths, finished = 0, 0, 0, False
    for place, name in moments:
        original = getattr(place, name)

        def guarded(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed > fatal:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, guarded)
    while not finished:
        passed = 0
        try:
            run(out="killed")
            finished = True
        except Killed:
            deaths += 1
            fatal += 1
    assert deaths > 10
    folder = expected.parent / "killed"
    assert weights(folder) == weights(expected)
    manifests = [json.loads((f / "manifest.json").read_text()) for f in (folder, expected)]
    for manifest in manifests:
        del manifest["recipe"]["out"]
    assert manifests[0] == manifests[1]
    assert sorted(os.listdir(folder / "checkpoints")) == sorted(os.listdir(expected / "checkpoints"))
    timing = ("seconds", "tokens_per_s")
    for kind in ("train", "validation"):
        rows = [
            [{key: value for key, value in row.items() if key not in timing} for row in metrics(f, kind)]
            for f in (folder, expected)
        ]
        assert rows[0] == rows[1]
    assert "ignored half-written checkpoints: step-0000" in capsys.readouterr().out


def test_a_finished_run_says_so_and_another_recipe_is_refused(run: Run, capsys: pytest.CaptureFixture[str]):
    folder = run()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run("--log.project=elsewhere")
    assert "already finished" in capsys.readouterr().out
    with pytest.raises(HeadwayError, match=r"was trained with optim\.lr 0\.003, this run has 0\.01; .* delete"):
        run("--optim.lr=1e-2")
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_continuation_that_differs_is_refused(run: Run, tmp_path: Path):
    with killed_after(7):
        run()
    with pytest.raises(HeadwayError, match=r"was trained with head\.num_heads 3, this run has 2"):
        run("--head.num_heads=2")
    latest = max((tmp_path / "head" / "checkpoints").glob("step-*"))
    saved = json.loads((latest / "state.json").read_text())
    for change, message in [
        (
            {"launch": saved["launch"] | {"processes": 2}},
            "saved with processes 2, this run has 1; .* resume with processes 2",
        ),
        (
            {"launch": saved["launch"] | {"kind": "DEEPSPEED ZeRO-3"}},
            "with kind DEEPSPEED ZeRO-3, this run has (NO|MULTI)",
        ),
        ({"launch": saved["launch"] | {"precision": "bf16"}}, "with precision bf16, this run has no;"),
        (
            {"features": {**saved["features"], "manifest_sha256": "0" * 64}},
            "was trained with features.manifest_sha256 000",
        ),
        ({"target": {**saved["target"], "fingerprint": "0" * 64}}, "was trained with target.fingerprint 000"),
    ]:
        (latest / "state.json").write_text(json.dumps(saved | change))
        with pytest.raises(HeadwayError, match=message):
            run()


def test_keeps_the_last_checkpoints_and_the_best(run: Run):
    folder = run("--save.every=1", "--save.keep_last=3")
    total, best = metrics(folder, "train")[-1]["step"], load_head(folder).manifest["best"]["step"]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert [name for name in names if name.startswith("step-")] == [f"step-{total - i:06d}" for i in (2, 1, 0)]
    assert f"best-{best:06d}" in names
    assert not [name for name in names if name.startswith(".")]


def test_a_folder_that_holds_something_else_is_refused(run: Run, tmp_path: Path, tiny_target_dir: Path):
    shutil.copytree(tiny_target_dir, tmp_path / "model")
    with pytest.raises(HeadwayError, match="holds a model that no training run wrote"):
        run(out="model")
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match="a file, not a folder"):
        run(out="file")
