"""EAGLE heads (methods.md, section 4): a small decoder that drafts one token after the other from the target's own states.

Here: what EAGLE-1 and EAGLE-3 share, and EAGLE-1 (Li et al. 2024, section 4). Row t combines the state of position t with
the token after it, x_{t+1}, stands at position t, and predicts x_{t+2}.

Shapes: B rows, N nodes of a pass, C keys in view, X tokens of all texts of a batch, P packed rows (heads/served.py), R rows of a
step, S steps, H hidden, F states of the target side by side, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.checkpoint import register
from heads.divergences import DIVERGENCES, FEATURES
from heads.draft_layer import DraftLayer, KeyValueCache, LayerConfig, Rope
from heads.errors import HeadwayError
from heads.linear import FewRowsLinear
from heads.losses import HeadOutput, Output, Rows, draft_loss
from heads.mapped import MappedHead
from heads.served import draft_labels, served_labels, tally
from heads.unroll import Schedule, first_step, next_step, schedule

Embed = Callable[[Tensor], Tensor]
"""[...] token ids -> [..., H]: the target's embedding."""


class EagleHead(MappedHead):
    """What trainer, replay and drafters use of a head of this family; `taps` are the target's layers it reads."""

    config: LayerConfig
    taps: tuple[int, ...]
    layers: nn.ModuleList
    fc: nn.Linear

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        self.rope = Rope(config)

    def start_at_target(self, scale_H: Tensor) -> None:
        """Let a new head draft what the target's own output makes of the deepest state that it reads.

        From there it learns faster than from random weights. `scale_H`: TargetEnds.final_scale.
        """
        hidden = self.config.hidden_size
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:].fill_diagonal_(1.0)
            if self.fc.bias is not None:
                self.fc.bias.zero_()
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            layer.start_as_nothing()

    def features(self, last: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The target's states of any positions -> [..., H], what `run` takes for them.

        `last` [..., H]: after the final norm; `taps`: tap -> [..., H], at least those of `self.taps`.
        """
        raise NotImplementedError

    def enter(self, features: Tensor, embeds: Tensor) -> Tensor:
        """[..., H] the state that enters the first layer."""
        raise NotImplementedError

    def leave(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's output -> (what the next step takes as features, what `logits` takes), both [..., H]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, output: Output | None = None) -> Tensor:
        """[..., H] -> [..., D]. `output` is the target's own; heads that carry an output matrix do not need it."""
        raise NotImplementedError

    def features_of(self, states_XF: Tensor) -> Tensor:
        """`features` of a batch, whose states lie side by side: the taps in their order, or the last one."""
        raise NotImplementedError

    def loss(
        self, rows_S: Sequence[Rows], last_PH: Tensor, output: Output, losses: Mapping[str, float]
    ) -> tuple[Tensor, list[Tensor]]:
        """Loss sums of every step, and which of its rows have the right argmax."""
        raise NotImplementedError

    def run(
        self,
        features_BNH: Tensor,
        embeds_BNH: Tensor,
        positions_BN: Tensor,
        mask_B1NC: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass of the draft layers over N nodes: (features of the next step, hidden states for `logits`), [B, N, H].

        features: `features` of the target's states where they are known, else what the parent node's pass returned;
        embeds: the target's embedding of the token AFTER that state; positions: of the state, counted from 0.
        mask: bool (True = visible) or additive, over the C keys in the cache's view; needed with a cache. Without cache
        and mask the nodes are a text: causal.
        Raises ValueError for a cache without a mask.
        """
        if mask_B1NC is None:
            if cache is not None:
                raise ValueError("a pass over a cache needs the mask of what each node sees")
            nodes = positions_BN.shape[1]
            mask_B1NC = torch.ones(1, 1, nodes, nodes, dtype=torch.bool, device=positions_BN.device).tril()
        embeds_BNH = embeds_BNH.to(features_BNH.dtype)
        h_BNH = self.enter(features_BNH, embeds_BNH)
        rope = self.rope(positions_BN, h_BNH.dtype)
        for number, layer in enumerate(self.layers):
            h_BNH = layer(h_BNH, embeds_BNH, rope, mask_B1NC, cache, number)
        return self.leave(h_BNH)

    def unroll(self, features_XH: Tensor, embeds_XH: Tensor, plan: Schedule) -> list[Tensor]:
        """The training-time test: for each step the states that `logits` takes [R, H], of the rows that `plan` lists.

        `features_XH`: of every token of the texts; `embeds_XH`: the target's embedding of the same tokens.
        """
        layers: list[Any] = list(self.layers)
        embeds_XH = embeds_XH.to(features_XH.dtype)
        next_XH = torch.cat([embeds_XH[1:], embeds_XH[:1]])  # what a text's last token gets here is seen by no row
        h_XH = self.enter(features_XH, next_XH)
        h_RH, keys = first_step(layers, self.rope, h_XH, next_XH, plan)
        fed_RH, hidden_RH = self.leave(h_RH)
        hidden_S = [hidden_RH]
        for step, rows in enumerate(plan.steps[1:], 1):
            e_RH = embeds_XH.index_select(0, rows.tokens_R + 1 + step)
            h_RH = self.enter(fed_RH.index_select(0, rows.kept_R), e_RH)
            fed_RH, hidden_RH = self.leave(next_step(layers, self.rope, h_RH, e_RH, keys, plan, step))
            hidden_S.append(hidden_RH)
        return hidden_S

    def forward(
        self,
        ids_X: Tensor,
        lengths_B: Tensor,
        index_P: Tensor,
        segment_P: Tensor,
        states_XF: Tensor,
        last_PH: Tensor,
        *,
        embed: Embed,
        output: Output,
        losses: Mapping[str, float],
        steps: int,
        noise: float = 0.0,
    ) -> HeadOutput:
        """One training pass over texts that lie one behind the other: loss numerators, counts, accuracies of every step.

        `lengths_B`: their tokens; `index_P`, `segment_P`: rows whose next token is the assistant's, as tokens, and the
        unbroken runs among them; `states_XF`: what `features_of` takes; `last_PH`: the target's last states of those rows.
        `output`: the target's output function over the draft vocabulary; `losses`: name -> weight (heads/divergences.py);
        `noise`: largest uniform noise on the features, in training mode. A token outside the draft vocabulary counts as a
        miss and takes no part in the loss.
        """
        labels_PS = served_labels(ids_X[index_P + 1], segment_P, steps)
        draft_PS = draft_labels(labels_PS, self.draft_ids_of())
        plan = schedule(lengths_B.tolist(), index_P, labels_PS)
        features_XH = self.features_of(states_XF)
        if self.training and noise:
            features_XH = features_XH + torch.empty_like(features_XH).uniform_(-noise, noise)
        rows_S, indices_S = [], []
        for step, hidden_RH in enumerate(self.unroll(features_XH, embed(ids_X), plan)):
            packed_R = plan.steps[step].packed_R
            labels_R = draft_PS[packed_R, step]
            inside_R = (labels_R >= 0).nonzero().squeeze(1)
            indices_S.append(packed_R[inside_R])
            rows_S.append(Rows(hidden_RH.index_select(0, inside_R), labels_R[inside_R], indices_S[-1] + 1 + step))
        numerators_S, hits_S = self.loss(rows_S, last_PH, output, losses)
        return tally(numerators_S, labels_PS, draft_PS, indices_S, hits_S)


@dataclass(frozen=True)
class Eagle1Config(LayerConfig):
    """`fc_bias`: of fc, which public heads have; engines expect none. The vocabulary is the target's."""

    fc_bias: bool = False
    kind: ClassVar[str] = "eagle"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None:
            raise HeadwayError("draft_vocab_size: EAGLE-1 drafts with the target's own output; leave it out")


@register
class Eagle1Head(EagleHead):
    """fc(2H -> H) on [e(x_{t+1}); f_t], then layers of which the first has no input norm; the output is the next feature.

    f_t is the target's state after its final norm; logits are the target's own output function of the predicted one.
    """

    config_class = Eagle1Config
    config: Eagle1Config
    taps = ()

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        self.fc = FewRowsLinear(2 * config.hidden_size, config.hidden_size, config.fc_bias)
        self.layers = nn.ModuleList(
            DraftLayer(config, "normed" if number else "bare") for number in range(config.num_layers)
        )

    def features(self, last: Tensor, taps: dict[int, Tensor]) -> Tensor:
        return last.to(self.fc.weight.dtype)

    def enter(self, features: Tensor, embeds: Tensor) -> Tensor:
        # autocast makes a product narrower, and the residual stream begins with this one
        return self.fc(torch.cat([embeds.to(features.dtype), features], -1)).to(features.dtype)

    def leave(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h

    def logits(self, hidden: Tensor, output: Output | None = None) -> Tensor:
        """Raises ValueError without the target's output function: this head has none of its own."""
        if output is None:
            raise ValueError("an EAGLE-1 head predicts states; give the target's output function")
        return output(hidden)

    def features_of(self, states_XF: Tensor) -> Tensor:
        return self.features(states_XF, {})

    def loss(
        self, rows_S: Sequence[Rows], last_PH: Tensor, output: Output, losses: Mapping[str, float]
    ) -> tuple[Tensor, list[Tensor]]:
        """Among the losses may be "smooth_l1": the predicted state against the target's, a mean over H (section 4.2)."""
        laws = {name: weight for name, weight in losses.items() if name in DIVERGENCES}
        numerators_S, hits_S = draft_loss(rows_S, output, last_PH, output, laws)
        if weight := losses.get(FEATURES):
            distances = [
                F.smooth_l1_loss(rows.x_RH, last_PH[rows.slots_R].to(rows.x_RH.dtype), reduction="none").mean(-1).sum()
                for rows in rows_S
            ]
            numerators_S = numerators_S + weight * torch.stack(distances)
        return numerators_S, hits_S
