"""Heads in the layouts of engines, made by hand: the names, shapes and config keys that public folders have, at small sizes.

Nothing here comes from heads/formats. Shapes: H hidden 32, V vocabulary, D draft vocabulary 40, I inner size 48; 4 heads of size 8 over
2 key-value heads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.eagle import Eagle1Config, Eagle1Head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocabulary import DraftVocabulary

H, D, INNER, HEADS, KV, SIZE = 32, 40, 48, 4, 2, 8
LAYERS, POSITIONS = 8, 512
TAPS = (2, 4, 5)  # what engines read of 8 layers when nothing is said
SHAPE: dict[str, Any] = {
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "intermediate_size": INNER,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": POSITIONS,
}


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def layer_tensors(make: Any, prefix: str, inputs: int) -> dict[str, Tensor]:
    """Attention, MLP and the norm between them."""
    return {
        f"{prefix}self_attn.q_proj.weight": make(HEADS * SIZE, inputs),
        f"{prefix}self_attn.k_proj.weight": make(KV * SIZE, inputs),
        f"{prefix}self_attn.v_proj.weight": make(KV * SIZE, inputs),
        f"{prefix}self_attn.o_proj.weight": make(H, HEADS * SIZE),
        f"{prefix}mlp.gate_proj.weight": make(INNER, H),
        f"{prefix}mlp.up_proj.weight": make(INNER, H),
        f"{prefix}mlp.down_proj.weight": make(H, INNER),
        f"{prefix}post_attention_layernorm.weight": make(H),
    }


def eagle3_tensors(vocab: int, layer: str = "midlayer.", taps: int = 3, draft: int = D) -> dict[str, Tensor]:
    """A whole EAGLE-3 head; the draft vocabulary is every seventh token from 3 on."""
    generator = torch.Generator().manual_seed(3)

    def make(*shape: int) -> Tensor:
        return random(generator, *shape)

    ids_D = 3 + 7 * torch.arange(draft) if draft < vocab else torch.arange(vocab)
    tensors = layer_tensors(make, layer, 2 * H) | {
        "fc.weight": make(H, taps * H),
        f"{layer}input_layernorm.weight": make(H),
        f"{layer}hidden_norm.weight": make(H),
        "norm.weight": make(H),
        "lm_head.weight": make(draft, H),
    }
    if draft < vocab:
        tensors["d2t"] = ids_D - torch.arange(draft)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids_D, True)
    return tensors


def eagle3_config(vocab: int, **more: Any) -> dict[str, Any]:
    """As the public heads write it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": SIZE,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": POSITIONS,
        "vocab_size": vocab,
        "draft_vocab_size": D,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | more


def speculators_config(vocab: int, **more: Any) -> dict[str, Any]:
    """As the speculators library saves it."""
    layer = {key: value for key, value in eagle3_config(vocab).items() if key != "draft_vocab_size"}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "draft_vocab_size": D,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "somewhere", "architectures": ["LlamaForCausalLM"]},
        },
    } | more


def eagle1_tensors(layers: int = 1, bias: bool = True) -> dict[str, Tensor]:
    """fc and layers; the first layer has no input norm."""
    generator = torch.Generator().manual_seed(5)

    def make(*shape: int) -> Tensor:
        return random(generator, *shape)

    tensors = {"fc.weight": make(H, 2 * H)} | ({"fc.bias": make(H)} if bias else {})
    for number in range(layers):
        tensors |= layer_tensors(make, f"layers.{number}.", H)
        if number:
            tensors[f"layers.{number}.input_layernorm.weight"] = make(H)
    return tensors


def medusa_tensors(vocab: int, heads: int = 3, layers: int = 1, prefix: str = "") -> dict[str, Tensor]:
    """The original layout."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for k in range(heads):
        for j in range(layers):
            tensors[f"{prefix}{k}.{j}.linear.weight"] = random(generator, H, H)
            tensors[f"{prefix}{k}.{j}.linear.bias"] = random(generator, H)
        tensors[f"{prefix}{k}.{layers}.weight"] = random(generator, vocab, H)
    return tensors


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    """A folder with one weight file, pickled where its name says so."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def read(folder: Path, name: str = "model.safetensors") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors) of a folder."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / name)


def filled(head: Any, seed: int = 0) -> Any:
    """Every parameter random, in evaluation mode, with a manifest."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(random(generator, *parameter.shape))
    head.manifest = {"note": "by a test"}
    return head.eval()


def eagle3_head(vocab: int, draft: int | None = D, **more: Any) -> Eagle3Head:
    """One of ours; the draft vocabulary is every third token from 2 on."""
    config = Eagle3Config(**SHAPE | {"vocab_size": vocab, "draft_vocab_size": draft, "taps": TAPS} | more)
    head = Eagle3Head(config)
    ids_D = 2 + 3 * torch.arange(draft) if draft else torch.arange(vocab)
    head.set_vocabulary(DraftVocabulary(ids_D, vocab))
    return filled(head)


def eagle1_head(vocab: int, **more: Any) -> Eagle1Head:
    """One of ours."""
    return filled(Eagle1Head(Eagle1Config(**SHAPE | {"vocab_size": vocab} | more)))


def medusa_head(vocab: int, draft: int | None = None, **more: Any) -> MedusaHead:
    """One of ours, with 3 heads of 2 residual layers."""
    settings = {
        "hidden_size": H,
        "vocab_size": vocab,
        "draft_vocab_size": draft,
        "num_heads": 3,
        "num_layers": 2,
    } | more
    head = MedusaHead(MedusaConfig(**settings))
    ids_D = 2 + 3 * torch.arange(draft) if draft else torch.arange(vocab)
    head.set_vocabulary(DraftVocabulary(ids_D, vocab))
    return filled(head)


def same(left: torch.nn.Module, right: torch.nn.Module) -> None:
    """Bit for bit, dtypes too."""
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name
