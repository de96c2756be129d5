"""The decoder layer of autoregressive draft heads: rope, grouped-query attention, gated MLP, as engines know it from Llama.

Shapes: B rows, N nodes of a pass, C keys in view, R gathered rows, A attention heads, G key-value heads, E head size, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads.errors import HeadwayError
from heads.linear import FewRowsLinear, FewRowsRMSNorm
from heads.mapped import MappedConfig

FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, kw_only=True)
class LayerConfig(MappedConfig):
    """What the layers of a draft head are; `layer_settings` reads it off a target's config.

    `rope_parameters` are transformers': rope_theta, rope_type and what that type needs.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int = 1
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "num_layers",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise HeadwayError(f"{name}: {value!r} is not a whole number above 0")
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadwayError(
                f"num_key_value_heads: {self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise HeadwayError(f"head_dim: {self.head_dim} is odd; rotary positions turn pairs")
        if self.hidden_act not in ACT2FN:
            raise HeadwayError(f"hidden_act: {self.hidden_act!r} is no activation that transformers knows")
        kind = self.rope_parameters.get("rope_type")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise HeadwayError(
                f"rope_parameters: rope_type {kind!r} is neither default nor {sorted(ROPE_INIT_FUNCTIONS)}"
            )


def layer_settings(target_config: Any) -> dict[str, Any]:
    """A target's text config -> the fields of `LayerConfig`: its own sizes, GQA, rope, eps and activation.

    What a target's architecture does not have (rope in GPT-2, a gated MLP's size) gets Llama's customary value.
    """

    def first(names: tuple[str, ...], default: Any) -> Any:
        return next((found for name in names if (found := getattr(target_config, name, None)) is not None), default)

    hidden, heads = int(target_config.hidden_size), int(target_config.num_attention_heads)
    return {
        "hidden_size": hidden,
        "vocab_size": int(target_config.vocab_size),
        "num_attention_heads": heads,
        "num_key_value_heads": int(first(("num_key_value_heads",), heads)),
        "head_dim": int(first(("head_dim",), hidden // heads)),
        "intermediate_size": int(first(("intermediate_size", "n_inner"), 4 * hidden)),
        "hidden_act": first(("hidden_act", "hidden_activation", "activation_function"), "silu"),
        "rms_norm_eps": float(first(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-5)),
        "rope_parameters": read_rope(target_config),
        "max_position_embeddings": int(first(("max_position_embeddings", "n_positions"), 2048)),
    }


def read_rope(config: Any) -> dict[str, Any]:
    """Rope settings in transformers 5's style (`rope_parameters`) from either style (`rope_theta`, `rope_scaling`).

    Where layers differ, those of full attention count.
    """
    found = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    nested = {kind: part for kind, part in found.items() if isinstance(part, dict)}
    if nested:
        found = dict(nested.get(FULL_ATTENTION, next(iter(nested.values()))))
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", None)):
        value = getattr(config, name, None)
        value = default if value is None else value
        if value is not None:
            found.setdefault(name, value)
    return found


class Rope:
    """Rotary positions as the target has them. No module: its frequencies belong to no checkpoint and are made at first use.

    Frequencies that depend on a text's length (dynamic, longrope) are those within the target's original positions.
    """

    def __init__(self, config: LayerConfig) -> None:
        self._config = config
        self._made: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[...] positions -> cos and sin [..., E], in `dtype`."""
        if positions.device not in self._made:
            self._made[positions.device] = self._frequencies(positions.device)
        frequencies, scale = self._made[positions.device]
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        config, rope = self._config, dict(self._config.rope_parameters)
        if rope["rope_type"] == "default":
            turned = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, turned, 2, dtype=torch.float32, device=device) / turned
            return rope["rope_theta"] ** -exponents, 1.0
        like_target = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=rope,
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](like_target, device)
        return frequencies.to(device, torch.float32), float(scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, E] turned by cos and sin [..., 1, turned]; dimensions past `turned` stay (partial rope)."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned


class KeyValueCache(Protocol):
    """What `update` of a transformers Cache and of eval.cache.SlotCache is."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keep a pass's keys and values [B, G, N, E]; returns those in view [B, G, C, E]."""


class Attention(nn.Module):
    """Projections of grouped-query attention; `inputs` is the width it reads."""

    def __init__(self, config: LayerConfig, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = FewRowsLinear(inputs, self.heads * self.head_dim, bias)
        self.k_proj = FewRowsLinear(inputs, self.kv_heads * self.head_dim, bias)
        self.v_proj = FewRowsLinear(inputs, self.kv_heads * self.head_dim, bias)
        self.o_proj = FewRowsLinear(self.heads * self.head_dim, config.hidden_size, bias)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[..., inputs] -> [..., A, E], rotated; `rope` is cos and sin [..., E]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return rotate(q, *(part.unsqueeze(-2) for part in rope))

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., inputs] -> keys, rotated, and values [..., G, E]."""
        k, v = (project(x).unflatten(-1, (self.kv_heads, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return rotate(k, *(part.unsqueeze(-2) for part in rope)), v


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = FewRowsLinear(hidden, inner, bias)
        self.up_proj = FewRowsLinear(hidden, inner, bias)
        self.down_proj = FewRowsLinear(inner, hidden, bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One layer. `reads` is what its attention sees of the state h and the embedding e:

    "both" cat(input_layernorm(e), hidden_norm(h)), the first layer of EAGLE-3; "normed" input_layernorm(h), the usual
    one; "bare" h itself, the first layer of EAGLE-1. The residual is h; `normed_residual`, for "both": hidden_norm(h).
    """

    def __init__(
        self, config: LayerConfig, reads: Literal["both", "normed", "bare"], normed_residual: bool = False
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.reads, self.normed_residual = reads, normed_residual
        if reads != "bare":
            self.input_layernorm = FewRowsRMSNorm(hidden, eps)
        if reads == "both":
            self.hidden_norm = FewRowsRMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden if reads == "both" else hidden)
        self.post_attention_layernorm = FewRowsRMSNorm(hidden, eps)
        self.mlp = GatedMLP(config)

    def start_as_nothing(self) -> None:
        """Let attention and MLP add nothing to the residual stream until training makes them."""
        with torch.no_grad():
            for parameter in (*self.self_attn.o_proj.parameters(), *self.mlp.down_proj.parameters()):
                parameter.zero_()

    def attention_input(self, h: Tensor, e: Tensor) -> Tensor:
        """What queries, keys and values are projected from."""
        if self.reads == "both":
            return torch.cat([self.input_layernorm(e), self.hidden_norm(h)], -1)
        return self.input_layernorm(h) if self.reads == "normed" else h

    def finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after attention [..., A, E] and MLP."""
        residual = self.hidden_norm(h) if self.normed_residual else h
        h = residual + self.self_attn.o_proj(attended.flatten(-2))
        return h + self.mlp(self.post_attention_layernorm(h))

    def forward(
        self,
        h_BNH: Tensor,
        e_BNH: Tensor,
        rope: tuple[Tensor, Tensor],
        mask_B1NC: Tensor,
        cache: KeyValueCache | None,
        number: int,
    ) -> Tensor:
        """One pass over nodes; keys and values go through `cache` as layer `number`."""
        x = self.attention_input(h_BNH, e_BNH)
        q_BNAE = self.self_attn.queries(x, rope)
        k, v = (part.transpose(1, 2) for part in self.self_attn.keys_values(x, rope))
        if cache is not None:
            k, v = cache.update(k, v, number)
        return self.finish(h_BNH, attend(q_BNAE, k, v, mask_B1NC))


def attend(q_BNAE: Tensor, k_BGCE: Tensor, v_BGCE: Tensor, mask_B1NC: Tensor) -> Tensor:
    """Grouped-query attention -> [B, N, A, E]. The queries of a group lie behind each other, so keys are not copied."""
    rows, nodes, heads, size = q_BNAE.shape
    kv_heads = k_BGCE.shape[1]
    group = heads // kv_heads
    q_BGXE = q_BNAE.view(rows, nodes, kv_heads, group, size).permute(0, 2, 3, 1, 4)
    mask_B1XC = mask_B1NC[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    out_BGXE = F.scaled_dot_product_attention(q_BGXE.flatten(2, 3), k_BGCE, v_BGCE, mask_B1XC)
    return out_BGXE.unflatten(2, (group, nodes)).permute(0, 3, 1, 2, 4).flatten(2, 3)
