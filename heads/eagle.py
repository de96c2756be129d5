"""EAGLE heads (methods.md, section 4): a small decoder that drafts one token after the other from the target's own states.

Here: what EAGLE-1 and EAGLE-3 share, and EAGLE-1 (Li et al. 2024, section 4). Row t combines the state of position t with
the token after it, x_{t+1}, stands at position t, and predicts x_{t+2}.

Shapes: B rows, N nodes of a pass, C keys in view, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from heads.checkpoint import Head, register
from heads.draft_layer import DraftLayer, KeyValueCache, LayerConfig, Rope
from heads.linear import FewRowsLinear

Output = Callable[[Tensor], Tensor]
"""[..., H] states after the target's final norm -> [..., V]: the target's own output function."""


class EagleHead(Head):
    """What trainer, replay and drafters use of a head of this family; `taps` are the target's layers it reads."""

    config: LayerConfig
    taps: tuple[int, ...]
    layers: nn.ModuleList

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        self.rope = Rope(config)

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

    def target_ids(self) -> Tensor:
        """[D]: the target id of each draft id."""
        raise NotImplementedError

    def draft_ids_of(self) -> Tensor:
        """[V]: the draft id of each target id, -1 for those outside the draft vocabulary."""
        ids_D = self.target_ids()
        inverse_V = ids_D.new_full((self.config.vocab_size,), -1)
        inverse_V[ids_D] = torch.arange(len(ids_D), device=ids_D.device)
        return inverse_V

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
        h_BNH = self.enter(features_BNH, embeds_BNH)
        rope = self.rope(positions_BN, h_BNH.dtype)
        for number, layer in enumerate(self.layers):
            h_BNH = layer(h_BNH, embeds_BNH, rope, mask_B1NC, cache, number)
        return self.leave(h_BNH)


@dataclass(frozen=True)
class Eagle1Config(LayerConfig):
    """`fc_bias`: of fc, which public heads have; engines expect none."""

    fc_bias: bool = False
    kind: ClassVar[str] = "eagle"


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
        return self.fc(torch.cat([embeds.to(features.dtype), features], -1))

    def leave(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h

    def logits(self, hidden: Tensor, output: Output | None = None) -> Tensor:
        """Raises ValueError without the target's output function: this head has none of its own."""
        if output is None:
            raise ValueError("an EAGLE-1 head predicts states; give the target's output function")
        return output(hidden)

    def target_ids(self) -> Tensor:
        return torch.arange(self.config.vocab_size, device=self.fc.weight.device)
