"""A standard decoder's forward pass without what transformers adds to every call.

One token through a small model is some thousand operator calls, most of them not products. Here the products of one
input are one (q, k and v; gate and up), norms and attention are single operators, heads that share keys are one block
of queries, and no mask, cache object or output record is made in between. The weights are the target's own: its modules
become views of the joined ones. Decoders of another build go through transformers' own forward.

Shapes: B rows, N nodes, H hidden, A query heads, K key heads, G = A / K, E head size, C slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.cache import SlotCache
from heads.errors import HeadwayError
from heads.linear import FewRowsLinear, few_rows_linear, rms_norm
from heads.target import States, Target

# Decoders of this build, by transformers' class: RMSNorm, rope, attention, residual, RMSNorm, gated MLP, residual.
FAMILIES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")

_known: WeakKeyDictionary[Target, LeanDecoder | None] = WeakKeyDictionary()


def lean_decoder(target: Target) -> LeanDecoder | None:
    """The target's lean decoder, made once; None where its build or its weights (quantised, adapted) are others."""
    if target not in _known:
        _known[target] = LeanDecoder(target) if _fits(target) else None
    return _known[target]


def _fits(target: Target) -> bool:
    decoder = target.decoder
    if type(decoder).__name__ not in FAMILIES or not type(decoder).__module__.startswith("transformers."):
        return False
    linears = [module for layer in decoder.layers for module in layer.modules() if hasattr(module, "in_features")]
    plain = all(type(module) in (nn.Linear, FewRowsLinear) for module in linears)
    return plain and target.config._attn_implementation == "sdpa"


def compile_target(target: Target) -> None:
    """Let the target's layers run compiled. Raises HeadwayError where its build has no lean pass."""
    lean = lean_decoder(target)
    if lean is None:
        raise HeadwayError(
            f"target '{target.name}' ({target.config.model_type}): only {', '.join(FAMILIES)} with plain weights are "
            "compiled; leave out --compile"
        )
    lean.compile()


class _Joined:
    """Linear layers of one input as one product; the given modules keep their weights as views of the joined one."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias: Tensor | None = None
        if any(part.bias is not None for part in parts):
            biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
            self.bias = torch.cat([bias.detach() for bias in biases])
        start = 0
        for part in parts:
            end = start + len(part.weight)
            part.weight.data = self.weight[start:end]
            start = end

    def __call__(self, x_BNH: Tensor) -> Tensor:
        return few_rows_linear(x_BNH, self.weight, self.bias)


class _Layer:
    """One decoder layer over the slot cache."""

    def __init__(self, layer: Any, head_dim: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim, self.scaling = head_dim, attention.scaling
        self.query_heads = attention.q_proj.out_features // head_dim
        self.key_heads = attention.k_proj.out_features // head_dim
        self.qkv = _Joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = _Joined([mlp.gate_proj, mlp.up_proj])
        self.out, self.down, self.activation = attention.o_proj, mlp.down_proj, mlp.act_fn
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

    def __call__(self, h_BNH: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, slots: Any) -> Tensor:
        h_BNH = h_BNH + self.out(self._attend(normed(h_BNH, self.before), cos, sin, mask, slots))
        gate, up = self.gate_up(normed(h_BNH, self.between)).chunk(2, -1)
        return h_BNH + self.down(self.activation(gate) * up)

    def _attend(self, x_BNH: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, slots: Any) -> Tensor:
        rows, nodes, _ = x_BNH.shape
        queries, keys, size = self.query_heads, self.key_heads, self.head_dim
        qkv = self.qkv(x_BNH).view(rows, nodes, queries + 2 * keys, size)
        turned, value = qkv.split([queries + keys, keys], 2)
        if self.head_norms[0] is not None:
            heads = turned.split([queries, keys], 2)
            turned = torch.cat([normed(x, norm) for x, norm in zip(heads, self.head_norms, strict=True)], 2)
        turned = torch.addcmul(turned * cos, turned.roll(size // 2, -1), sin)
        query, key = turned.split([queries, keys], 2)
        keys_BKCE, values_BKCE = slots.update(key.transpose(1, 2), value.transpose(1, 2))
        query = query.view(rows, nodes, keys, -1, size).permute(0, 2, 3, 1, 4).reshape(rows, keys, -1, size)
        mixed = F.scaled_dot_product_attention(query, keys_BKCE, values_BKCE, mask, scale=self.scaling)
        return mixed.view(rows, keys, -1, nodes, size).permute(0, 3, 1, 2, 4).reshape(rows, nodes, -1)


class LeanDecoder:
    """`LeanDecoder(target)(ids, positions, masks, cache, taps)`: the states that the target's decoder gives."""

    def __init__(self, target: Target) -> None:
        decoder, config = target.decoder, target.config
        self.embed, self.norm, self.rotary = decoder.embed_tokens, decoder.norm, decoder.rotary_emb
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.layers = [_Layer(layer, head_dim) for layer in decoder.layers]
        self.kinds = getattr(config, "layer_types", None) or [""] * len(self.layers)
        self.groups = self.layers[0].query_heads // self.layers[0].key_heads
        self.compiled, self._run = False, self._through_layers

    def compile(self, backend: str = "inductor") -> None:
        """From now on verification passes run as one compiled graph for each shape; compiling one takes a minute or two."""
        self.compiled = True
        self._run = torch.compile(self._through_layers, backend=backend, fullgraph=True, dynamic=False)

    def __call__(
        self,
        ids_BN: Tensor,
        positions_BN: Tensor,
        masks: Tensor | dict[str, Tensor],
        cache: SlotCache,
        taps: Sequence[int] = (),
        prefill: bool = False,
    ) -> States:
        """One pass over the nodes that `cache.begin` prepared; `masks` as eval.masks.pass_masks gives them.

        A prefill is never compiled: hardly two have the same length.
        """
        h_BNH = self.embed(ids_BN)
        cos_BNE, sin_BNE = self.rotary(h_BNH, positions_BN)
        half = sin_BNE.shape[-1] // 2
        cos, sin = cos_BNE[:, :, None], torch.cat([-sin_BNE[..., :half], sin_BNE[..., half:]], -1)[:, :, None]
        if isinstance(masks, dict):
            by_kind = {kind: self._additive(mask, h_BNH.dtype) for kind, mask in masks.items()}
        else:
            by_kind = dict.fromkeys(self.kinds, self._additive(masks, h_BNH.dtype))
        run = self._through_layers if prefill else self._run
        last_BNH, tapped = run(h_BNH, cos, sin, by_kind, cache, tuple(taps))
        return States(last_BNH, dict(zip(taps, tapped, strict=True)))

    def _through_layers(
        self,
        h_BNH: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: dict[str, Tensor],
        cache: SlotCache,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        entering: dict[int, Tensor] = {}
        for number, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            entering[number] = h_BNH
            h_BNH = layer(h_BNH, cos, sin, masks[kind], cache.layers[number])
        return normed(h_BNH, self.norm), [entering[tap] for tap in taps]

    def _additive(self, visible_B1NC: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, 1, G N, C]: 0 where visible, else minus infinity, once for each head of a group."""
        mask = torch.zeros_like(visible_B1NC, dtype=dtype).masked_fill_(~visible_B1NC, -torch.inf)
        return mask.repeat(1, 1, self.groups, 1)


def normed(x: Tensor, norm: Any) -> Tensor:
    """The norm as one operator; in float64 the module itself, which computes it in float32."""
    return norm(x) if x.dtype == torch.float64 else rms_norm(x, norm.weight, norm.variance_epsilon)
