"""A head on disk: bit for bit there and back, atomic, and nothing missing, extra or misshapen gets in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heads
from heads import checkpoint
from heads.checkpoint import save_head
from heads.errors import HeadwayError
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocabulary import DraftVocabulary


def make_head(seed: int = 0, draft: int | None = 11, output: Any = "own") -> MedusaHead:
    generator = torch.Generator().manual_seed(seed)
    config = MedusaConfig(
        hidden_size=6, vocab_size=23, draft_vocab_size=draft, num_heads=3, num_layers=2, output=output
    )
    ids_D = torch.randperm(23, generator=generator)[: draft or 23].sort().values
    head = MedusaHead.from_target(config, torch.randn(23, 6, generator=generator), DraftVocabulary(ids_D, 23))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return head


def assert_same(left: torch.nn.Module, right: torch.nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(("draft", "output"), [(11, "own"), (11, "shared"), (None, "own"), (23, "shared")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_bit_for_bit(tmp_path: Path, draft: int | None, output: str, dtype: torch.dtype):
    head = make_head(draft=draft, output=output).to(dtype)
    head.manifest = {"target": {"name": "tiny", "fingerprint": "ab" * 32}, "note": "ä"}
    head.save_pretrained(tmp_path / "head")
    loaded = heads.load_head(tmp_path / "head")
    assert type(loaded) is MedusaHead
    assert loaded.config == head.config
    assert loaded.manifest == head.manifest
    assert not loaded.training
    assert_same(loaded, head)
    assert ("d2t" in loaded.state_dict()) == (draft == 11)
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "manifest.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "head" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "head")) == ["config.json", "manifest.json", "model.safetensors"]
    assert load_dtype(tmp_path / "head") == torch.float64


def load_dtype(folder: Path) -> torch.dtype:
    return heads.load_head(folder, dtype=torch.float64).lm_head.weight.dtype


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.1.layers.0.bias"), r"`blocks\.1\.layers\.0\.bias` is missing \(1 in all\)"),
        (lambda t: t.update(extra=torch.zeros(2)), "`extra` does not belong to this head"),
        (lambda t: t.update(d2t=torch.zeros(10, dtype=torch.int64)), r"`d2t` has shape \[10\].*\[11\]"),
        (lambda t: t.update(d2t=t["d2t"].float()), "`d2t` is torch.float32, not torch.int64"),
        (lambda t: t["d2t"].add_(100), "`d2t` gives ids outside the vocabulary"),
        (lambda t: t["t2d"].fill_(True), "`t2d` does not mark the ids"),
    ],
)
def test_refuses_tensors_that_do_not_fit(tmp_path: Path, change: Any, message: str):
    make_head().save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(HeadwayError, match=message) as caught:
        heads.load_head(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads: 0 is not a whole number above 0"),
        ({"kind": "hydra"}, "`kind` is not one of .*medusa"),
        ({"heads": 3}, "unknown key `heads`"),
        ({"vocab_size": None}, "key `vocab_size` is missing"),
        ({"draft_vocab_size": 0}, "draft_vocab_size: 0"),
        ({"output": "tied"}, "output: 'tied'"),
    ],
)
def test_refuses_a_config_that_does_not_fit(tmp_path: Path, change: dict[str, Any], message: str):
    make_head().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = {key: value for key, value in (json.loads(path.read_text()) | change).items() if value is not None}
    path.write_text(json.dumps(config))
    with pytest.raises(HeadwayError, match=message) as caught:
        heads.load_head(tmp_path)
    assert "config.json" in str(caught.value)


def test_refuses_missing_and_damaged_files(tmp_path: Path):
    with pytest.raises(HeadwayError, match="no such folder"):
        heads.load_head(tmp_path / "nowhere")
    for name in ("config.json", "model.safetensors", "manifest.json"):
        folder = tmp_path / name
        make_head().save_pretrained(folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(HeadwayError, match=name):
            heads.load_head(folder)
        (folder / name).unlink()
        with pytest.raises(HeadwayError, match=f"{name}: no such file"):
            heads.load_head(folder)


class Killed(BaseException):
    """Stands for a SIGKILL at one call."""


def test_a_kill_at_any_write_leaves_the_old_head_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Die at the n-th file operation of an overwriting save, for every n; the folder always loads, as one of the two."""
    old, new = make_head(0), make_head(1)
    outcomes = []
    for fatal in range(100):
        folder = tmp_path / str(fatal)
        (folder / "checkpoints").mkdir(parents=True)
        save_head(old, folder, {"which": "old"})
        calls = 0

        def guarded(function: Any, fatal: int = fatal) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                if calls == fatal:
                    raise Killed
                calls += 1
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, "replace", guarded(os.replace))
            patch.setattr(checkpoint.os, "chmod", guarded(os.chmod))
            patch.setattr(checkpoint, "save_file", guarded(checkpoint.save_file))
            patch.setattr(checkpoint, "_write_json", guarded(checkpoint._write_json))
            patch.setattr(checkpoint, "_sync", guarded(checkpoint._sync))
            patch.setattr(checkpoint.Path, "rmdir", guarded(Path.rmdir))
            try:
                save_head(new, folder, {"which": "new"})
                finished = True
            except Killed:
                finished = False
        loaded = heads.load_head(folder)
        outcomes.append(loaded.manifest["which"])
        assert_same(loaded, {"old": old, "new": new}[loaded.manifest["which"]])
        save_head(new, folder, {"which": "newest"})
        assert heads.load_head(folder).manifest["which"] == "newest"
        assert sorted(os.listdir(folder)) == ["checkpoints", "config.json", "manifest.json", "model.safetensors"]
        if finished:
            break
    assert finished
    assert outcomes == sorted(outcomes, reverse=True)  # old, old, ..., new, new: one moment of change
    assert set(outcomes) == {"old", "new"}
