"""Quantised targets: those that this machine can run give the states of their own values; the others are refused with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from data_prep.collect import Settings, collect
from data_prep.store import FeatureStore
from heads.errors import HeadwayError
from heads.loading import _require_divisible
from heads.target import Target, TargetEnds, resolve
from tests.conftest import make_conversations, write_conversations
from tests.heads.quantised import declare, write_fp8, write_gguf


def reference(target: Path, weights: dict[str, Tensor]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    return model


def collected(target: str, folder: Path) -> FeatureStore:
    file = write_conversations(folder / "three.jsonl", make_conversations(3))
    collect(Settings(file, folder / "store", target, "1,3", "float32", "float32", held_out=0))
    return FeatureStore.open(folder / "store")


def equal_states(store: FeatureStore, model: Any) -> None:
    """Every stored state is that of the reference, each conversation alone."""
    for stored in store:
        with torch.no_grad():
            expected = model(stored.ids_T[None], output_hidden_states=True)
        for tap in (1, 3):
            torch.testing.assert_close(stored.taps[tap], expected.hidden_states[tap][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stored.last_TH, expected.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
        served_T = stored.top1_T >= 0
        assert torch.equal(stored.top1_T[served_T], expected.logits[0].argmax(-1)[served_T])


def test_a_gguf_file_is_a_target(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    expected = write_gguf(tiny_target_dir, file)
    original = load_file(tiny_target_dir / "model.safetensors")
    assert max(float((expected[name] - original[name]).abs().max()) for name in original) > 1e-4  # it was rounded
    found = load_file(resolve(str(file)) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    equal_states(collected(str(file), tmp_path), reference(tiny_target_dir, expected))
    assert [path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()] == ["tiny"]  # converted once
    ends = TargetEnds.load(str(file), "float32", "cpu")
    assert torch.equal(ends.lm_head_weight, expected["lm_head.weight"])


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HeadwayError, match=r"none\.gguf: there is no such file"):
        resolve(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, or so it says" * 100)
    with pytest.raises(HeadwayError, match=r"bad\.gguf: transformers cannot read it"):
        resolve(str(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache").glob("*"))


def test_fp8_weights_are_collected_from(tiny_target_dir: Path, tmp_path: Path):
    """Without a GPU transformers expands them: the values that were served, at the cost of memory."""
    folder = tmp_path / "fp8"
    expected = write_fp8(tiny_target_dir, folder)
    target = Target.load(str(folder), "float32", "cpu")
    for name, weight in target.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0, msg=name)
    equal_states(collected(str(folder), tmp_path), reference(tiny_target_dir, expected))
    ends = TargetEnds.load(str(folder), "float32", "cpu")
    assert torch.equal(ends.lm_head_weight, expected["lm_head.weight"])


REFUSED = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, "'awq'.*gptqmodel"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "'gptq'.*optimum"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'.*bitsandbytes"),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}, "'compressed-tensors'"),
    ({"quant_method": "homemade"}, "'homemade', which transformers does not know"),
]


@pytest.mark.parametrize(("quantisation", "message"), REFUSED, ids=[str(each["quant_method"]) for each, _ in REFUSED])
def test_what_does_not_run_here_is_refused_with_the_reason(
    tiny_target_dir: Path, tmp_path: Path, quantisation: dict[str, Any], message: str
):
    folder = shutil.copytree(tiny_target_dir, tmp_path / "quantised")
    declare(folder, quantisation)
    with pytest.raises(HeadwayError, match=rf"{folder}: quantised by {message}.*not quantised"):
        Target.load(str(folder), "float32", "cpu")


def test_weights_that_nothing_reads_or_that_are_missing_are_refused(tiny_target_dir: Path, tmp_path: Path):
    """FP8 numbers without their scales would be a target all the same, of noise."""
    bare = tmp_path / "bare"
    write_fp8(tiny_target_dir, bare)
    declare(bare, None)
    with pytest.raises(
        HeadwayError, match=r"holds 'model\.layers\.0\..*weight_scale_inv' and 27 more tensors of a quantised"
    ):
        Target.load(str(bare), "float32", "cpu")
    short = shutil.copytree(tiny_target_dir, tmp_path / "short")
    weights = load_file(short / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, short / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        HeadwayError, match=r"1 weights of the model are in no file, the first is 'model\.layers\.2\.mlp\.up"
    ):
        Target.load(str(short), "float32", "cpu")
    TargetEnds.load(str(short), "float32", "cpu")  # its ends are whole


def test_heads_that_do_not_divide_among_the_processes_are_refused(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    config = reference(tiny_target_dir, load_file(tiny_target_dir / "model.safetensors")).config  # 4 heads, 2 of keys
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    _require_divisible(tiny_target_dir, config)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(HeadwayError, match="2 key-value heads cannot be split over 4 processes"):
        _require_divisible(tiny_target_dir, config)
    monkeypatch.setattr(type(config), "base_model_tp_plan", {})
    with pytest.raises(HeadwayError, match="no plan that splits the layers of 'llama'"):
        _require_divisible(tiny_target_dir, config)
