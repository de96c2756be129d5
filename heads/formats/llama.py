"""The draft layer's settings as a Llama config says them, both ways; where a config contradicts the tensors, they are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from heads.draft_layer import LayerConfig, read_rope
from heads.errors import HeadwayError
from heads.formats.files import Foreign
from heads.formats.layout import TargetFacts

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
GATES = ("gate_proj", "up_proj", "down_proj")


def llama_fields(config: LayerConfig, target: TargetFacts, notes: list[str]) -> dict[str, Any]:
    """The keys of a Llama config for a head, its positions at least the target's: engines stop, or go wrong, at a lower limit.

    Raises HeadwayError for sizes that no Llama config may have.
    """
    if config.hidden_size % config.num_attention_heads:
        raise HeadwayError(
            f"{config.num_attention_heads} heads do not divide the hidden size {config.hidden_size}: transformers' LlamaConfig, "
            "and with it every engine, refuses such a head"
        )
    positions = config.max_position_embeddings
    if target.max_positions is not None and positions < target.max_positions:
        notes.append(
            f"max_position_embeddings: the head says {positions}, the target's {target.max_positions} is written"
        )
        positions = target.max_positions
    rope = dict(config.rope_parameters)
    fields = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.pop("rope_theta"),
        "max_position_embeddings": positions,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }
    if (part := rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        fields["partial_rotary_factor"] = part
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    own, theirs = config.rope_parameters, read_rope(target.config)
    if own != theirs:
        notes.append(f"rope: the head's is {own}, the target's {theirs}; the head's own is written")
    return fields


def layer_shapes(config: dict[str, Any], prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """The tensors of attention and MLP behind `prefix` that a Llama config asks for; q, k and v read `inputs` values."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    rows = {"q_proj": (query, inputs), "k_proj": (keys, inputs), "v_proj": (keys, inputs), "o_proj": (hidden, query)}
    gates = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {}
    for module, part, bias in (("self_attn", rows, config["attention_bias"]), ("mlp", gates, config["mlp_bias"])):
        for name, shape in part.items():
            shapes[f"{prefix}{module}.{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}{module}.{name}.bias"] = shape[:1]
    return shapes


def layer_fields(
    foreign: Foreign, config: dict[str, Any], prefix: str, layers: int, target: TargetFacts
) -> dict[str, Any]:
    """The fields of `LayerConfig` for a file whose first layer lies behind `prefix`, vocabulary and hidden size apart.

    Raises HeadwayError where the config cannot be read, or says nothing that fits the tensors.
    """
    where = foreign.folder / "config.json"
    known = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    try:
        llama = LlamaConfig(**known)
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise HeadwayError(f"{where}: not a Llama config ({' '.join(str(error).split())[:200]})") from error
    if llama.num_hidden_layers != layers:
        _say(foreign, "num_hidden_layers", llama.num_hidden_layers, layers)
    inner = len(_rows(foreign, f"{prefix}mlp.gate_proj.weight"))
    if llama.intermediate_size != inner:
        _say(foreign, "intermediate_size", llama.intermediate_size, inner)
    heads, kv_heads, size = _attention(foreign, llama, prefix, bool(config.get("head_dim")))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": inner,
        "num_layers": layers,
        "hidden_act": llama.hidden_act,
        "rms_norm_eps": float(llama.rms_norm_eps),
        "rope_parameters": _rope(foreign, config, target),
        "max_position_embeddings": _positions(foreign, int(llama.max_position_embeddings), target),
        "attention_bias": f"{prefix}self_attn.o_proj.bias" in foreign.tensors,
        "mlp_bias": f"{prefix}mlp.down_proj.bias" in foreign.tensors,
    }


def _attention(foreign: Foreign, llama: Any, prefix: str, stated: bool) -> tuple[int, int, int]:
    """Heads, key-value heads and head size. The projections' rows are products of them, so the config has to say how many heads."""
    query, keys = (len(_rows(foreign, f"{prefix}self_attn.{name}.weight")) for name in ("q_proj", "k_proj"))
    heads, kv_heads, size = int(llama.num_attention_heads), int(llama.num_key_value_heads), int(llama.head_dim)
    if heads * size != query:
        if query % heads or kv_heads * (query // heads) != keys:
            raise HeadwayError(
                f"{foreign.folder / 'config.json'}: {heads} heads, {kv_heads} key-value heads of size {size} do not make the "
                f"{query} and {keys} rows of q_proj and k_proj; correct the config"
            )
        if stated:
            _say(foreign, "head_dim", size, query // heads)
        size = query // heads
    if kv_heads * size != keys:
        if keys % size or heads % (keys // size):
            raise HeadwayError(
                f"{foreign.weights}: the {keys} rows of k_proj are no heads of size {size}; correct the config"
            )
        _say(foreign, "num_key_value_heads", kv_heads, keys // size)
        kv_heads = keys // size
    return heads, kv_heads, size


def _rope(foreign: Foreign, config: dict[str, Any], target: TargetFacts) -> dict[str, Any]:
    """The head's own, which it was trained with, whatever the target's is."""
    own, theirs = read_rope(SimpleNamespace(**config)), read_rope(target.config)
    if own != theirs:
        foreign.note(f"rope: the head's config means {own}, the target's is {theirs}; the head's own is taken")
    return own


def _positions(foreign: Foreign, own: int, target: TargetFacts) -> int:
    """At least the target's: a draft stands at the target's positions, and low limits in public configs bind nothing."""
    if target.max_positions is None or own >= target.max_positions:
        return own
    foreign.note(
        f"max_position_embeddings: the config says {own}, the target has {target.max_positions}, which is taken"
    )
    return target.max_positions


def _rows(foreign: Foreign, name: str) -> Tensor:
    found = foreign.tensors.get(name)
    if found is None or found.dim() != 2:
        raise HeadwayError(f"{foreign.weights}: tensor `{name}` is missing or no matrix; the file is not a whole head")
    return found


def _say(foreign: Foreign, key: str, stated: Any, found: Any) -> None:
    foreign.note(f"{key}: the config says {stated}, the file holds {found}: the file is right")
