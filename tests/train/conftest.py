"""A feature store of the tiny target, a recipe over it, and runs of the trainer inside the test's process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState

from data_prep.collect import Settings, collect
from tests.conftest import make_conversations, write_conversations
from train import medusa

Run = Callable[..., Path]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one state per process; sums of one thread, so that weights can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _reset()
    yield
    _reset()
    torch.set_num_threads(threads)


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Folder of a store with 40 conversations of the tiny target, fp32."""
    folder = tmp_path_factory.mktemp("tiny-features")
    conversations = write_conversations(folder / "tiny.jsonl", make_conversations(40, seed=7))
    collect(
        Settings(
            conversations=conversations,
            out=folder / "store",
            target=str(tiny_target_dir),
            dtype="float32",
            store_dtype="float32",
            held_out=0,
        )
    )
    return folder / "store"


@pytest.fixture
def recipe_file(tmp_path: Path, features: Path, tiny_target_dir: Path) -> Path:
    """A recipe of 12 steps with checkpoints every 3, whose vocabulary leaves some of the text out."""
    recipe = {
        "target": str(tiny_target_dir),
        "out": str(tmp_path / "head"),
        "seed": 3,
        "data": {"features": str(features), "held_out": 6},
        "head": {"num_heads": 3, "draft_vocab_size": 40},
        "optim": {"lr": 3e-3, "epochs": 3, "batch_tokens": 1024, "warmup": 0.25},
        "save": {"every": 3, "confirm": 0},
        "log": {"wandb": "off"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture
def run(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("--optim.lr=1e-2", out="other")`: train in this process; returns the folder of the head."""

    def train(*arguments: str, out: str = "head") -> Path:
        _reset()
        folder = tmp_path / out
        monkeypatch.setattr(sys, "argv", ["medusa.py", f"--config={recipe_file}", f"--out={folder}", *arguments])
        medusa.main()
        return folder

    return train


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]
