"""EAGLE-1 and EAGLE-2 heads: one layout, read by vLLM and by SGLang under two names, by SGLang with a bias of fc.

Shapes as in tests/heads/foreign.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.eagle import Eagle1Head
from heads.errors import HeadwayError
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head, read_head
from heads.target import Target
from tests.conftest import save_tiny_target
from tests.heads.foreign import (
    HEADS,
    INNER,
    KV,
    SIZE,
    H,
    eagle1_head,
    eagle1_tensors,
    eagle3_config,
    read,
    same,
    save,
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> TargetFacts:
    return TargetFacts.load(str(tiny_target_dir))


def config(vocab: int, **more: Any) -> dict[str, Any]:
    """As public heads write it: no draft vocabulary, a bias."""
    plain = {key: value for key, value in eagle3_config(vocab).items() if key != "draft_vocab_size"}
    return plain | {"architectures": ["LlamaForCausalLM"], "bias": True} | more


def test_names_shapes_and_architectures(tmp_path: Path, target: TargetFacts):
    head = eagle1_head(target.vocab_size)
    shapes = {
        "fc.weight": [H, 2 * H],
        "embed_tokens.weight": [target.vocab_size, H],
        "layers.0.self_attn.q_proj.weight": [HEADS * SIZE, H],
        "layers.0.self_attn.k_proj.weight": [KV * SIZE, H],
        "layers.0.self_attn.v_proj.weight": [KV * SIZE, H],
        "layers.0.self_attn.o_proj.weight": [H, HEADS * SIZE],
        "layers.0.mlp.gate_proj.weight": [INNER, H],
        "layers.0.mlp.up_proj.weight": [INNER, H],
        "layers.0.mlp.down_proj.weight": [H, INNER],
        "layers.0.post_attention_layernorm.weight": [H],
    }
    export_head(head, target, "vllm", tmp_path / "vllm")
    written, tensors = read(tmp_path / "vllm")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert (written["architectures"], written["bias"]) == (["EagleLlamaForCausalLM"], False)
    wanted = Target.load(target.name, "float32", "cpu").model.get_input_embeddings().weight
    assert torch.equal(tensors["embed_tokens.weight"], wanted)
    export_head(head, target, "sglang", tmp_path / "sglang")
    written, tensors = read(tmp_path / "sglang")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == shapes | {"fc.bias": [H]}
    assert (written["architectures"], written["bias"]) == (["LlamaForCausalLMEagle"], True)
    assert not tensors["fc.bias"].any()  # else SGLang's own would stay as it was drawn


@pytest.mark.parametrize("more", [{}, {"num_layers": 3}, {"attention_bias": True}])
@pytest.mark.parametrize(("to", "bias"), [("vllm", False), ("sglang", False), ("sglang", True)])
def test_round_trip_bit_for_bit(tmp_path: Path, target: TargetFacts, to: str, bias: bool, more: dict[str, Any]):
    head = eagle1_head(target.vocab_size, fc_bias=bias, **more).to(torch.bfloat16)
    export_head(head, target, to, tmp_path / "out")
    back = read_head(tmp_path / "out", target.name)
    assert back.head.config == head.config
    same(back.head, head)
    export_head(back.head, target, to, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_vllm_has_no_place_for_a_bias(tmp_path: Path, target: TargetFacts):
    head = eagle1_head(target.vocab_size, fc_bias=True)
    with pytest.raises(HeadwayError, match=r"fc has a bias: .*--to sglang"):
        export_head(head, target, "vllm", tmp_path / "out")
    with torch.no_grad():
        head.fc.bias.zero_()
    assert "fc.bias is zero" in export_head(head, target, "vllm", tmp_path / "out").notes[0]
    with pytest.raises(
        HeadwayError, match=r"--to speculators: takes eagle3 heads, this one is eagle; use --to vllm or sgl"
    ):
        export_head(head, target, "speculators", tmp_path / "no")


@pytest.mark.parametrize("rounded", [torch.float16, torch.bfloat16, torch.float32])
def test_a_public_folder_with_old_names_is_read(tmp_path: Path, target: TargetFacts, rounded: torch.dtype):
    """A pickled file with a prefix, the rope's buffer, and the target's embedding in a narrower dtype."""
    tensors = eagle1_tensors()
    old = {f"model.{name}": tensor for name, tensor in tensors.items()}
    old["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(SIZE // 2)
    old["model.embed_tokens.weight"] = target.embedding_VH.to(rounded)
    folder = save(tmp_path / "head", config(target.vocab_size, max_position_embeddings=2048), old, "pytorch_model.bin")
    found = read_head(folder, target.name)
    assert isinstance(found.head, Eagle1Head)
    assert found.head.config.fc_bias
    assert found.head.config.max_position_embeddings == 2048
    state = found.head.state_dict()
    assert set(state) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor)
    assert any("inv_freq" in note for note in found.notes)
    assert any("left out embed_tokens" in note for note in found.notes)


def test_a_head_says_what_it_was_trained_with(tmp_path: Path, target: TargetFacts):
    """No rope_theta means 10,000 to every engine, whatever the target has."""
    said = config(target.vocab_size, rope_theta=77.0)
    found = read_head(save(tmp_path / "a", said, eagle1_tensors()), target.name)
    assert found.head.config.rope_parameters["rope_theta"] == 77.0
    assert any(note.startswith("rope: ") for note in found.notes)
    del said["rope_theta"]
    found = read_head(save(tmp_path / "b", said, eagle1_tensors()), target.name)
    assert found.head.config.rope_parameters["rope_theta"] == 10000.0


FAULTS = {
    r"its first layer norms its input": lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(H)}),
    r"is not the embedding of": lambda t: t.update({"embed_tokens.weight": torch.ones(288, H)}),
    r"`embed_tokens.weight` has shape \[5, 32\]": lambda t: t.update({"embed_tokens.weight": torch.ones(5, H)}),
    r"`lm_head\.weight` does not belong": lambda t: t.update({"lm_head.weight": torch.ones(288, H)}),
    r"not \[H, 2H\]": lambda t: t.update({"fc.weight": torch.ones(H, 3 * H)}),
    r"`layers\.0\.mlp\.down_proj\.weight` is missing": lambda t: t.pop("layers.0.mlp.down_proj.weight"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, target: TargetFacts, message: str):
    tensors = eagle1_tensors()
    FAULTS[message](tensors)
    with pytest.raises(HeadwayError, match=message):
        read_head(save(tmp_path / "head", config(target.vocab_size), tensors), target.name)
    with pytest.raises(HeadwayError, match=r"leave --taps out"):
        read_head(save(tmp_path / "ok", config(target.vocab_size), eagle1_tensors()), target.name, (1, 2))


def test_another_target_is_refused_by_its_sizes(tmp_path: Path, target: TargetFacts, tiny_tokenizer: Any):
    wide = save_tiny_target(tmp_path / "wide", tiny_tokenizer, hidden_size=64)
    folder = save(tmp_path / "head", config(target.vocab_size), eagle1_tensors())
    with pytest.raises(HeadwayError, match=r"hidden size of 32, target '.*wide' has 64"):
        read_head(folder, str(wide))
    with pytest.raises(HeadwayError, match=r"give it with --target"):
        read_head(folder)
