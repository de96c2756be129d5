"""What an EAGLE head is made of: the target's rope and layers, its taps, its checkpoint, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads import load_head
from heads.draft_layer import Rope, layer_settings
from heads.eagle import Eagle1Config
from heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from heads.errors import HeadwayError
from tests.heads.eagle_batches import KINDS, H, forward, make_head, random, texts

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_rope_is_the_targets(kind: str):
    """Against transformers' own module, from settings in the new and in the old style."""
    new = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(ROPES[kind])
    )
    positions = torch.tensor([[0, 3, 200], [7, 255, 1]])
    expected = LlamaRotaryEmbedding(new)(torch.zeros(1), positions)
    scaling = {name: value for name, value in ROPES[kind].items() if name not in ("rope_theta", "rope_type")}
    old = SimpleNamespace(**{name: getattr(new, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")})
    old.max_position_embeddings, old.rope_theta = 256, ROPES[kind]["rope_theta"]
    old.rope_scaling = {"type": kind} | scaling if scaling else None
    for config in (new, old):
        found = Rope(Eagle1Config(**layer_settings(config)))(positions, torch.float32)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_layer_is_made_of_the_targets_settings():
    gemma = Gemma3TextConfig(
        num_hidden_layers=6, head_dim=64, hidden_size=96, num_attention_heads=3, num_key_value_heads=1
    )
    found = layer_settings(gemma)
    assert (found["head_dim"], found["hidden_act"]) == (64, "gelu_pytorch_tanh")
    assert found["rope_parameters"]["rope_theta"] == gemma.rope_parameters["full_attention"]["rope_theta"]
    gpt2 = layer_settings(GPT2Config(n_embd=48, n_head=4, n_positions=99))
    assert (gpt2["head_dim"], gpt2["intermediate_size"], gpt2["max_position_embeddings"]) == (12, 192, 99)
    assert gpt2["hidden_act"] == "gelu_new"
    for settings in (found, gpt2):
        Eagle3Head(Eagle3Config(**settings, taps=(1,)))


def test_taps_are_distinct_layers_of_any_target():
    """Case 18: methods.md's formula wherever it gives three ascending layers."""
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    for layers in range(1, 40):
        taps = default_taps(layers)
        assert len(set(taps)) == min(3, layers)
        assert all(0 <= tap < layers for tap in taps)
        if layers >= 7:
            assert taps == (2, layers // 2, layers - 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_is_the_same_head(kind: str, tmp_path: Path):
    head = make_head(kind)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    assert type(loaded) is type(head)
    assert loaded.config == head.config
    left, right = head.state_dict(), loaded.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    a, b = forward(head.eval(), texts()), forward(loaded, texts())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(a, b, strict=True))


def test_configurations_that_cannot_be_are_refused():
    shape: dict[str, Any] = {"hidden_size": 8, "vocab_size": 9, "intermediate_size": 8, "head_dim": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for kind, change, message in [
        (Eagle3Config, {"taps": (1, 1)}, "taps"),
        (Eagle3Config, {"taps": ()}, "taps"),
        (Eagle3Config, {"taps": (1,), "draft_vocab_size": 10}, "draft_vocab_size"),
        (Eagle1Config, {"draft_vocab_size": 5}, "EAGLE-1"),
        (Eagle1Config, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (Eagle1Config, {"head_dim": 3}, "head_dim"),
        (Eagle1Config, {"hidden_act": "square"}, "hidden_act"),
        (Eagle1Config, {"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        (Eagle1Config, {"num_layers": 0}, "num_layers"),
    ]:
        with pytest.raises(HeadwayError, match=message):
            kind(**(shape | change))
    with pytest.raises(ValueError, match="output function"):
        make_head("eagle").logits(random(1, H))
