"""The training-time test (methods.md, section 4; EAGLE-3, section 3.2): S draft steps over texts that are known.

Step 0 reads the target's states; step j reads what step j - 1 made of the same row, with tokens, labels and mask moved on by one.
Row t stands at position t + j then and sees the step-0 keys up to row t and its own of the steps 1 to j: exactly what a
draft of depth j sees when it is decoded. Only keys are needed on every row, and on step 0 alone: all else is computed on the rows
that count.

Shapes: X tokens of all texts, one text behind the other; P packed rows (whose NEXT token is the assistant's); R rows of a step;
S steps; H hidden, I input of the projections, A attention heads, G key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from heads.draft_layer import DraftLayer, Rope
from heads.narrow_attention import Block, cut_blocks, narrow_attention


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: `packed_R` indexes the packed rows, `tokens_R` all tokens, `kept_R` the rows of the step before."""

    packed_R: Tensor
    tokens_R: Tensor
    kept_R: Tensor
    blocks: list[Block]


@dataclass(frozen=True)
class Schedule:
    """What every step needs to know of the texts: `positions_X` in the text, first tokens of texts, the steps' rows."""

    positions_X: Tensor
    starts: list[int]
    steps: list[StepRows]

    def all_rows(self) -> StepRows:
        """Every token, as layers below the last one need them at step 0."""
        all_X = torch.arange(len(self.positions_X), device=self.positions_X.device)
        return StepRows(all_X, all_X, all_X, cut_blocks(all_X.tolist(), self.starts))


def schedule(lengths: list[int], index_P: Tensor, labels_PS: Tensor) -> Schedule:
    """`lengths`: tokens of each text; `index_P`: the packed rows as tokens; `labels_PS`: -1 where step s is not served."""
    device = index_P.device
    starts = list(accumulate(lengths[:-1], initial=0)) if lengths else []
    positions = [torch.arange(length, device=device) for length in lengths]
    positions_X = torch.cat(positions) if positions else index_P.new_empty(0)
    steps: list[StepRows] = []
    packed_R = torch.arange(len(index_P), device=device)
    for served_P in (labels_PS >= 0).unbind(1):
        kept_R = served_P[packed_R].nonzero().squeeze(1)
        packed_R = packed_R[kept_R]
        tokens_R = index_P[packed_R]
        steps.append(StepRows(packed_R, tokens_R, kept_R, cut_blocks(tokens_R.tolist(), starts)))
    return Schedule(positions_X, starts, steps)


class LayerKeys:
    """Keys and values of one layer: of every token at step 0, and each row's own ones of later steps."""

    def __init__(self, k_XGE: Tensor, v_XGE: Tensor) -> None:
        self.k_XGE, self.v_XGE = k_XGE.to(v_XGE.dtype), v_XGE
        self._own: list[Tensor] = []

    def extend(self, k_RGE: Tensor, v_RGE: Tensor, kept_R: Tensor) -> None:
        """Add a step's own keys; of earlier steps' the rows `kept_R` are left."""
        new = [part.to(self.v_XGE.dtype).unsqueeze(1) for part in (k_RGE, v_RGE)]
        if self._own:
            new = [torch.cat([own.index_select(0, kept_R), part], 1) for own, part in zip(self._own, new, strict=True)]
        self._own = new

    def attend(self, q_RAE: Tensor, rows: StepRows) -> Tensor:
        """[R, A, E]."""
        own = self._own or [part.new_empty(len(q_RAE), 0, *part.shape[1:]) for part in (self.k_XGE, self.v_XGE)]
        q_RAE = q_RAE.to(self.v_XGE.dtype)
        return narrow_attention(q_RAE, self.k_XGE, self.v_XGE, own[0], own[1], rows.tokens_R, rows.blocks)


def first_step(
    layers: Sequence[DraftLayer], rope: Rope, h_XH: Tensor, e_XH: Tensor, plan: Schedule
) -> tuple[Tensor, list[LayerKeys]]:
    """Step 0: the last layer's output on the rows that count [R, H], and every layer's keys."""
    turns_X = rope(plan.positions_X, h_XH.dtype)
    keys: list[LayerKeys] = []
    for layer in layers[:-1]:
        x_XI = layer.attention_input(h_XH, e_XH)
        keys.append(LayerKeys(*layer.self_attn.keys_values(x_XI, turns_X)))
        h_XH = layer.finish(h_XH, keys[-1].attend(layer.self_attn.queries(x_XI, turns_X), plan.all_rows()))
    layer, rows = layers[-1], plan.steps[0]
    x_XI = layer.attention_input(h_XH, e_XH)
    keys.append(LayerKeys(*layer.self_attn.keys_values(x_XI, turns_X)))
    x_RI, cos_R, sin_R, h_RH = (part.index_select(0, rows.tokens_R) for part in (x_XI, *turns_X, h_XH))
    return layer.finish(h_RH, keys[-1].attend(layer.self_attn.queries(x_RI, (cos_R, sin_R)), rows)), keys


def next_step(
    layers: Sequence[DraftLayer],
    rope: Rope,
    h_RH: Tensor,
    e_RH: Tensor,
    keys: Sequence[LayerKeys],
    plan: Schedule,
    step: int,
) -> Tensor:
    """Step 1 and later, on the rows that count there [R, H]; extends the keys."""
    rows = plan.steps[step]
    turns_R = rope(plan.positions_X[rows.tokens_R] + step, h_RH.dtype)
    for layer, known in zip(layers, keys, strict=True):
        x_RI = layer.attention_input(h_RH, e_RH)
        known.extend(*layer.self_attn.keys_values(x_RI, turns_R), rows.kept_R)
        h_RH = layer.finish(h_RH, known.attend(layer.self_attn.queries(x_RI, turns_R), rows))
    return h_RH
