"""The training-time test of an EAGLE head as plainly as it can be written: every row at every step, over one mask of all steps' keys.

It reads a head's parameters and nothing else of it. Shapes: T tokens of a text, S steps, Q keys of all steps so far, H hidden,
D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

from heads.eagle import EagleHead
from heads.eagle3 import Eagle3Head


def norm(module: Any, x: Tensor) -> Tensor:
    """RMSNorm by its formula."""
    return module.weight * x * (x.pow(2).mean(-1, keepdim=True) + module.eps).rsqrt()


class PlainUnroll:
    """Logits [S, T, D] of a text, `states_TF` being what the head's batch holds; rows whose tokens run out are rubbish."""

    def __init__(self, head: EagleHead) -> None:
        config = head.config
        self.head, self.third = head, isinstance(head, Eagle3Head)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    def __call__(self, states_TF: Tensor, embeds_TH: Tensor, steps: int, output: Any) -> Tensor:
        head, length = self.head, len(states_TF)
        fed_TH = states_TF
        if self.third:
            taps = states_TF.chunk(len(head.taps), -1)
            if head.config.fc_norm:
                taps = [norm(module, tap) for module, tap in zip(head.fc_norm, taps, strict=True)]
            fused_TF = torch.cat(tuple(taps), -1)
            if head.config.norm_before_fc:
                fused_TF = norm(head.input_norm, fused_TF)
            fed_TH = F.linear(fused_TF, head.fc.weight)
        self.keys: list[list[Tensor]] = [[] for _ in head.layers]
        self.values: list[list[Tensor]] = [[] for _ in head.layers]
        logits = []
        for step in range(steps):
            e_TH = embeds_TH[(torch.arange(length) + 1 + step).clamp(max=length - 1)]
            h_TH = fed_TH if self.third else head.fc(torch.cat([e_TH, fed_TH], -1))
            for number in range(len(head.layers)):
                h_TH = self.layer(number, h_TH, e_TH, step)
            fed_TH = h_TH
            if self.third:
                normed_TH = norm(head.norm, h_TH)
                fed_TH = normed_TH if head.config.norm_output else h_TH
                logits.append(F.linear(normed_TH, head.lm_head.weight))
            else:
                logits.append(output(h_TH))
        return torch.stack(logits)

    def layer(self, number: int, h_TH: Tensor, e_TH: Tensor, step: int) -> Tensor:
        layer, config, length = self.head.layers[number], self.head.config, len(h_TH)
        if number:
            x = norm(layer.input_layernorm, h_TH)
        elif self.third:
            x = torch.cat([norm(layer.input_layernorm, e_TH), norm(layer.hidden_norm, h_TH)], -1)
        else:
            x = h_TH
        attention = layer.self_attn
        q, k, v = (
            project(x).view(1, length, -1, config.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = self.rotary(x, torch.arange(length)[None] + step)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        self.keys[number].append(k)
        self.values[number].append(v)
        group = config.num_attention_heads // config.num_key_value_heads
        keys, values = (
            repeat_kv(torch.cat(all_steps, 2), group) for all_steps in (self.keys[number], self.values[number])
        )
        own = torch.eye(length, dtype=torch.bool)
        mask_TQ = torch.cat([torch.ones(length, length, dtype=torch.bool).tril(), *[own] * step], 1)
        scores = (q @ keys.transpose(2, 3)) / config.head_dim**0.5
        out = scores.masked_fill(~mask_TQ, -torch.inf).softmax(-1) @ values
        if number == 0 and self.third and config.norm_before_residual:
            h_TH = norm(layer.hidden_norm, h_TH)
        h_TH = h_TH + attention.o_proj(out[0].transpose(0, 1).flatten(1))
        x = norm(layer.post_attention_layernorm, h_TH)
        mlp = layer.mlp
        return h_TH + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
