"""A feature store of the tiny target, a recipe over it, and runs of the trainer inside the test's process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState

from data_prep.collect import Settings, collect
from heads.checkpoint import WEIGHTS
from tests.conftest import make_conversations, write_conversations
from train import loop, medusa

Run = Callable[..., Path]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one state per process; sums of one thread, so that weights can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reset_accelerate()
    yield
    reset_accelerate()
    torch.set_num_threads(threads)


def reset_accelerate() -> None:
    """Let accelerate forget the run before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def make_store(folder: Path, target: Path, rows: list[dict[str, Any]], taps: str = "") -> Path:
    """A store of conversations under a tiny target, in fp32."""
    conversations = write_conversations(folder / "tiny.jsonl", rows)
    collect(
        Settings(
            conversations=conversations,
            out=folder / "store",
            target=str(target),
            taps=taps,
            dtype="float32",
            store_dtype="float32",
            held_out=0,
        )
    )
    return folder / "store"


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Folder of a store with 40 conversations of the tiny target, fp32."""
    return make_store(tmp_path_factory.mktemp("tiny-features"), tiny_target_dir, make_conversations(40, seed=7))


@pytest.fixture(scope="session")
def tapped(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Folder of a store of the tiny target with the taps of its 4 layers."""
    return make_store(tmp_path_factory.mktemp("tapped"), tiny_target_dir, make_conversations(30, 7), "1,2,3")


@pytest.fixture
def recipe_file(tmp_path: Path, features: Path, tiny_target_dir: Path) -> Path:
    """A Medusa recipe in a file."""
    return write_recipe(tmp_path / "recipe.yaml", medusa_recipe(features, tiny_target_dir))


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def medusa_recipe(features: Path, target: Path) -> dict[str, Any]:
    """12 steps with checkpoints every 3, and a vocabulary that leaves some of the text out."""
    return {
        "target": str(target),
        "seed": 3,
        "precision": "fp32",  # on every CPU
        "data": {"features": str(features), "held_out": 6},
        "head": {"num_heads": 3, "draft_vocab_size": 40},
        "optim": {"lr": 3e-3, "epochs": 3, "batch_tokens": 1024, "warmup": 0.25},
        "save": {"every": 3, "confirm": 0},
        "log": {"wandb": "off"},
    }


def eagle_recipe(features: Path, target: Path) -> dict[str, Any]:
    """EAGLE-3 in few steps, with a vocabulary that leaves some of the text out."""
    return {
        "target": str(target),
        "seed": 3,
        "precision": "fp32",  # on every CPU
        "data": {"features": str(features), "held_out": 5},
        "head": {"steps": 3, "draft_vocab_size": 40},
        "optim": {"lr": 3e-3, "epochs": 2, "batch_tokens": 600, "warmup": 0.25},
        "save": {"every": 3},
        "log": {"wandb": "off"},
    }


@pytest.fixture
def run(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Medusa heads by `recipe_file`."""
    return in_process(medusa.main, recipe_file, tmp_path, monkeypatch)


def in_process(main: Callable[[], None], recipe: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("--optim.lr=1e-2", out="other")`: a trainer's `main` in this process; returns the head's folder in `folder`."""

    def run(*arguments: str, out: str = "head") -> Path:
        reset_accelerate()
        monkeypatch.setattr(sys, "argv", ["train.py", f"--config={recipe}", f"--out={folder / out}", *arguments])
        main()
        return folder / out

    return run


class Killed(BaseException):
    """Stands for a SIGKILL."""


@contextmanager
def killed_after(steps: int) -> Iterator[None]:
    """Inside, training dies after so many steps."""
    original = loop._Run.train_step

    def step(self: Any, window: Any) -> None:
        if window.step > steps:
            raise Killed
        original(self, window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "train_step", step)
        with pytest.raises(Killed):
            yield


def weights(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]
