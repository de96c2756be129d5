"""Trainers read stores of 8-bit taps and never know."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.collect import Settings, collect
from tests.conftest import make_conversations, write_conversations
from tests.train.conftest import in_process, metrics, weights, write_recipe
from train import eagle, medusa


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> dict[str, Path]:
    """The same conversations with their taps in each format."""
    folder = tmp_path_factory.mktemp("packed")
    conversations = write_conversations(folder / "tiny.jsonl", make_conversations(24, seed=7))
    usual = {"target": str(tiny_target_dir), "taps": "1,2,3", "dtype": "float32", "held_out": 0, "top_k_logits": 2}
    for name in ("fp32", "bf16", "int8", "fp8"):
        collect(Settings(conversations, folder / name, tap_format=name, **usual))  # type: ignore[arg-type]
    return {path.name: path for path in folder.iterdir() if path.is_dir()}


def recipe(folder: Path, target: Path, head: dict[str, object]) -> Path:
    content = {
        "target": str(target),
        "seed": 3,
        "precision": "fp32",
        "head": head,
        "data": {"held_out": 5},
        "optim": {"lr": 3e-3, "epochs": 1, "batch_tokens": 600, "warmup": 0.25},
        "save": {"every": 100, "confirm": 0},
        "log": {"wandb": "off"},
    }
    return write_recipe(folder / "recipe.yaml", content)


def test_an_eagle_head_learns_about_the_same_from_8_bits(
    stores: dict[str, Path], tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of every step, beside what bf16 makes of it: the first one, before the heads part, within a percent."""
    file = recipe(tmp_path, tiny_target_dir, {"steps": 3, "draft_vocab_size": 40})
    run = in_process(eagle.main, file, tmp_path, monkeypatch)
    losses = {
        name: [row["loss"] for row in metrics(run(f"--data.features={folder}", out=name), "train")]
        for name, folder in stores.items()
    }
    assert len(losses["fp32"]) > 3
    for name, within in (("bf16", 2e-3), ("int8", 1e-2), ("fp8", 3e-2)):
        assert losses[name] != losses["fp32"]
        assert losses[name][0] == pytest.approx(losses["fp32"][0], rel=within)
        assert losses[name][-1] == pytest.approx(losses["fp32"][-1], rel=5e-2)


def test_medusa_heads_are_the_same_whatever_the_taps(
    stores: dict[str, Path], tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the last state alone, which stays in bf16."""
    file = recipe(tmp_path, tiny_target_dir, {"num_heads": 2, "draft_vocab_size": 40})
    run = in_process(medusa.main, file, tmp_path, monkeypatch)
    expected = weights(run(f"--data.features={stores['bf16']}", out="bf16"))
    assert weights(run(f"--data.features={stores['int8']}", out="int8")) == expected
