"""EAGLE-3 in the layouts of vLLM, SGLang and speculators, against folders made by hand and the engines' loading rules.

Shapes as in tests/heads/foreign.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heads
from heads.errors import HeadwayError
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head, read_head, save_headway
from tests.heads.foreign import (
    HEADS,
    INNER,
    KV,
    LAYERS,
    POSITIONS,
    SIZE,
    TAPS,
    D,
    H,
    eagle3_config,
    eagle3_head,
    medusa_head,
    read,
    same,
)


def raw_shapes(vocab: int) -> dict[str, list[int]]:
    """The table of the raw layout, written out."""
    return {
        "fc.weight": [H, 3 * H],
        "midlayer.input_layernorm.weight": [H],
        "midlayer.hidden_norm.weight": [H],
        "midlayer.post_attention_layernorm.weight": [H],
        "norm.weight": [H],
        "midlayer.self_attn.q_proj.weight": [HEADS * SIZE, 2 * H],
        "midlayer.self_attn.k_proj.weight": [KV * SIZE, 2 * H],
        "midlayer.self_attn.v_proj.weight": [KV * SIZE, 2 * H],
        "midlayer.self_attn.o_proj.weight": [H, HEADS * SIZE],
        "midlayer.mlp.gate_proj.weight": [INNER, H],
        "midlayer.mlp.up_proj.weight": [INNER, H],
        "midlayer.mlp.down_proj.weight": [H, INNER],
        "lm_head.weight": [D, H],
        "d2t": [D],
        "t2d": [vocab],
    }


def test_the_raw_layout_has_the_names_shapes_and_fields_of_the_engines(tmp_path: Path, target: TargetFacts):
    vocab = target.vocab_size
    head = eagle3_head(vocab).to(torch.bfloat16)
    written = export_head(head, target, "vllm", tmp_path / "out")
    config, tensors = read(tmp_path / "out")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == raw_shapes(vocab)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert (torch.arange(D) + tensors["d2t"]).tolist() == [2 + 3 * i for i in range(D)]
    expected = eagle3_config(vocab, torch_dtype="bfloat16")
    assert {key: config[key] for key in expected} == expected
    assert not any("layer_ids" in key or key == "eagle_config" for key in config)  # the engines' own taps
    assert written.notes == ()
    assert torch.equal(tensors["midlayer.self_attn.k_proj.weight"], head.layers[0].self_attn.k_proj.weight)


def test_other_taps_are_written_in_the_counting_of_each_engine(tmp_path: Path, target: TargetFacts):
    head = eagle3_head(target.vocab_size, taps=(1, 4, 6))
    export_head(head, target, "sglang", tmp_path / "out")
    config, _ = read(tmp_path / "out")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]}
    assert config["num_aux_hidden_states"] == 3
    assert read_head(tmp_path / "out", target.name).head.config == head.config


def sglang_loads(config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> tuple[set[str], list[int], Tensor]:
    """What SGLang's loader makes of a folder: tensors it took, layer inputs it reads, target ids of the drafts."""
    hidden, vocabulary, draft = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    size = config["head_dim"]
    rows = {"q": config["num_attention_heads"] * size, "k": config["num_key_value_heads"] * size}
    params = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.fc.weight": (hidden, 3 * config["target_hidden_size"]),
        "model.midlayer.self_attn.qkv_proj.weight": (rows["q"] + 2 * rows["k"], 2 * hidden),
        "model.midlayer.self_attn.o_proj.weight": (hidden, rows["q"]),
        "model.midlayer.mlp.gate_up_proj.weight": (2 * config["intermediate_size"], hidden),
        "model.midlayer.mlp.down_proj.weight": (hidden, config["intermediate_size"]),
        "model.midlayer.input_layernorm.weight": (hidden,),
        "model.midlayer.post_attention_layernorm.weight": (hidden,),
        "model.midlayer.hidden_norm.weight": (hidden,),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
    }
    stacked = {".q_proj": ".qkv_proj", ".k_proj": ".qkv_proj", ".v_proj": ".qkv_proj"}
    stacked |= {".gate_proj": ".gate_up_proj", ".up_proj": ".gate_up_proj"}
    filled: dict[str, int] = {}
    ids_D = torch.arange(draft)
    for name, tensor in tensors.items():
        if "d2t" in name:
            ids_D = tensor + torch.arange(len(tensor))
            continue
        if "t2d" in name:
            continue
        for part, whole in stacked.items():
            name = name.replace(part, whole)
        name = name if name in params else f"model.{name}"
        if name in params:  # others are skipped without a word
            assert tensor.shape[1:] == params[name][1:]
            filled[name] = filled.get(name, 0) + tensor.shape[0]
    for name, count in filled.items():
        assert count == params[name][0], name
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    taps = [2, layers // 2, layers - 3] if ids is None else [1 + each for each in ids]
    return set(params) - set(filled), taps, ids_D


@pytest.mark.parametrize("taps", [TAPS, (1, 4, 6), (3, 5, 7)])
@pytest.mark.parametrize("draft", [D, None])
def test_sglang_loads_every_tensor_and_reads_our_taps(
    tmp_path: Path, target: TargetFacts, taps: tuple[int, ...], draft: int | None
):
    head = eagle3_head(target.vocab_size, draft, taps=taps)
    export_head(head, target, "sglang", tmp_path / "out")
    config, tensors = read(tmp_path / "out")
    left, read_taps, ids_D = sglang_loads(config, tensors, LAYERS)
    assert left == {"model.embed_tokens.weight"}  # shared with the target's
    assert tuple(read_taps) == taps
    assert torch.equal(ids_D, head.target_ids())
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == POSITIONS


SWITCHES = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True, "norm_before_fc": True},
    {
        "taps": (0, 3, 5, 7),
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    },
    {"attention_bias": True, "mlp_bias": True},
]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("draft", [D, None])
def test_round_trip_bit_for_bit(
    tmp_path: Path, target: TargetFacts, to: str, draft: int | None, switches: dict[str, Any]
):
    head = eagle3_head(target.vocab_size, draft, **switches).to(torch.bfloat16)
    export_head(head, target, to, tmp_path / "out")
    back = read_head(tmp_path / "out", target.name)
    assert back.head.config == head.config
    assert back.head.manifest == head.manifest
    same(back.head, head)
    save_headway(back, tmp_path / "ours")
    same(heads.load_head(tmp_path / "ours"), head)
    export_head(back.head, target, to, tmp_path / "again")
    for name in ("config.json", "model.safetensors", "SERVING.md", "headway.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaled_rope_goes_there_and_back(tmp_path: Path, target: TargetFacts, kind: str):
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    head = eagle3_head(target.vocab_size, rope_parameters=rope)
    export_head(head, target, "vllm", tmp_path / "out")
    config, _ = read(tmp_path / "out")
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert read_head(tmp_path / "out", target.name).head.config == head.config


def test_several_layers_go_to_speculators_only(tmp_path: Path, target: TargetFacts):
    head = eagle3_head(target.vocab_size, num_layers=2)
    with pytest.raises(HeadwayError, match=r"2 draft layers.*--to speculators"):
        export_head(head, target, "vllm", tmp_path / "raw")
    export_head(head, target, "speculators", tmp_path / "out")
    config, tensors = read(tmp_path / "out")
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (HEADS * SIZE, H)
    assert "layers.1.hidden_norm.weight" not in tensors
    same(read_head(tmp_path / "out", target.name).head, head)


def test_the_speculators_layout_says_every_field(tmp_path: Path, target: TargetFacts):
    head = eagle3_head(target.vocab_size, fc_norm=True)
    export_head(head, target, "speculators", tmp_path / "out", draft_tokens=5)
    config, tensors = read(tmp_path / "out")
    wanted = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": False}
    wanted |= {"speculators_model_type": "eagle3", "model_type": "speculator_model", "draft_vocab_size": D}
    wanted |= {"target_hidden_size": H, "embed_requires_grad": False, "eagle_aux_hidden_state_layer_ids": list(TAPS)}
    assert {key: config[key] for key in wanted} == wanted
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}
        ],
        "verifier": {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]},
    }
    names = {name.replace("midlayer.", "layers.0.") for name in raw_shapes(target.vocab_size)}
    assert set(tensors) == names | {f"fc_norm.{tap}.weight" for tap in range(3)} | {"embed_tokens.weight"}
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding_VH)


def test_what_an_engine_would_skip_is_refused(tmp_path: Path, target: TargetFacts):
    vocab = target.vocab_size
    for switches, message in (
        ({"norm_before_residual": True}, "norm_before_residual: SGLang ignores it"),
        ({"norm_before_fc": True}, "norm_before_fc: SGLang ignores it"),
        ({"attention_bias": True}, "attention_bias: SGLang ignores it"),
        ({"taps": (0, 3, 5)}, r"taps \[0, 3, 5\]: SGLang reads three taps"),
        ({"taps": (1, 2, 3, 5)}, r"SGLang reads three taps"),
    ):
        with pytest.raises(HeadwayError, match=message):
            export_head(eagle3_head(vocab, **switches), target, "sglang", tmp_path / "out")
    with pytest.raises(
        HeadwayError, match=r"takes medusa heads, this one is eagle3; use --to vllm or sglang or specul"
    ):
        export_head(eagle3_head(vocab), target, "medusa", tmp_path / "out")
    with pytest.raises(HeadwayError, match=r"this one is medusa; vLLM 0.33 and SGLang"):
        export_head(medusa_head(vocab), target, "sglang", tmp_path / "out")
    broken = eagle3_head(vocab)
    with torch.no_grad():
        broken.fc.weight[0, 0] = torch.inf
    with pytest.raises(HeadwayError, match=r"`fc.weight` holds values that are not finite"):
        export_head(broken, target, "vllm", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_dtypes_are_converted_and_overflow_is_caught(tmp_path: Path, target: TargetFacts):
    head = eagle3_head(target.vocab_size)
    export_head(head, target, "speculators", tmp_path / "half", "float16")
    config, tensors = read(tmp_path / "half")
    assert config["torch_dtype"] == config["transformer_layer_config"]["torch_dtype"] == "float16"
    assert torch.equal(tensors["norm.weight"], head.norm.weight.half())
    assert tensors["d2t"].dtype == torch.int64
    with torch.no_grad():
        head.fc.weight[0, 0] = 70000.0
    with pytest.raises(HeadwayError, match=r"`fc.weight`.*overflow in float16: use bfloat16"):
        export_head(head, target, "vllm", tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()
