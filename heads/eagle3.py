"""EAGLE-3 (methods.md, section 4; Li et al. 2025, section 3), with the switches of 3.1.

Features are fc of three taps of the target; the head has an output matrix over its own draft vocabulary.

Shapes: H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from heads.checkpoint import register
from heads.draft_layer import DraftLayer, LayerConfig
from heads.eagle import EagleHead
from heads.errors import HeadwayError
from heads.linear import FewRowsLinear, FewRowsRMSNorm, few_rows_linear
from heads.losses import Output, Rows, draft_loss
from heads.vocabulary import DraftVocabulary


def default_taps(layers: int) -> tuple[int, ...]:
    """(2, N // 2, N - 3) for a target of N layers, as inputs of those layers (`hidden_states` of transformers).

    Where these are not three ascending layers (N below 7), three spread evenly over layers 1 to N - 1; N at most 3: all.
    """
    taps = (2, layers // 2, layers - 3)
    if taps[0] < taps[1] < taps[2]:
        return taps
    if layers <= 3:
        return tuple(range(layers))
    return (1, layers // 2, layers - 1)


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """`taps`: layers whose INPUT is read.

    3.1: `fc_norm` = an RMSNorm for each tap before fc; `norm_output` = the state after the final norm is fed back.
    Of heads trained elsewhere: `norm_before_residual` = the first layer's residual is hidden_norm(h); `norm_before_fc` = one
    RMSNorm over all taps side by side, instead of `fc_norm`.
    """

    taps: tuple[int, ...] = ()
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    kind: ClassVar[str] = "eagle3"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", tuple(self.taps))  # JSON has lists only
        if not self.taps or len(set(self.taps)) < len(self.taps) or any(tap < 0 for tap in self.taps):
            raise HeadwayError(f"taps: {list(self.taps)} are not distinct layers, counted from 0")
        if self.fc_norm and self.norm_before_fc:
            raise HeadwayError("fc_norm and norm_before_fc: both say how taps are normed before fc; set one of them")


class DraftOutput(nn.Module):
    """The output matrix [D, H], a module of its own: in its forward ZeRO-3 has it gathered."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.output_size, config.hidden_size))

    def forward(
        self, rows_S: Sequence[Rows], last_PH: Tensor, output: Output, losses: Mapping[str, float]
    ) -> tuple[Tensor, list[Tensor]]:
        """`draft_loss` over this weight."""
        return draft_loss(rows_S, self.weight, last_PH, output, losses)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        return few_rows_linear(hidden, self.weight)


@register
class Eagle3Head(EagleHead):
    """fc(taps) -> layers, the first of which also sees the embedding of the next token -> norm -> logits over D."""

    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.taps = config.taps
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(FewRowsRMSNorm(hidden, eps) for _ in config.taps)
        if config.norm_before_fc:
            self.input_norm = FewRowsRMSNorm(len(config.taps) * hidden, eps)
        self.fc = FewRowsLinear(len(config.taps) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(
            DraftLayer(config, "normed") if number else DraftLayer(config, "both", config.norm_before_residual)
            for number in range(config.num_layers)
        )
        self.norm = FewRowsRMSNorm(hidden, eps)
        self.lm_head = DraftOutput(config)

    @classmethod
    def from_target(cls, config: Eagle3Config, lm_head_VH: Tensor, vocabulary: DraftVocabulary) -> Eagle3Head:
        """A new head whose output starts as the rows of the target's lm_head, in float32."""
        head = cls(config)
        head.start_as_target(head.lm_head.weight, lm_head_VH, vocabulary)
        return head

    def start_at_target(self, scale_H: Tensor) -> None:
        super().start_at_target(scale_H)
        with torch.no_grad():
            self.norm.weight.copy_(scale_H)

    def features(self, last: Tensor, taps: dict[int, Tensor]) -> Tensor:
        return self.fuse([taps[tap] for tap in self.taps])

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """fc of the (normed) taps, each [..., H], in the order of `self.taps`."""
        taps = [tap.to(self.fc.weight.dtype) for tap in taps]
        if self.config.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        fused = torch.cat(taps, -1)
        # autocast makes a product narrower, and the residual stream begins with this one
        return self.fc(self.input_norm(fused) if self.config.norm_before_fc else fused).to(fused.dtype)

    def enter(self, features: Tensor, embeds: Tensor) -> Tensor:
        return features

    def leave(self, h: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(h)
        return (normed if self.config.norm_output else h), normed

    def logits(self, hidden: Tensor, output: Output | None = None) -> Tensor:
        return self.lm_head.logits(hidden)

    def features_of(self, states_XF: Tensor) -> Tensor:
        return self.fuse(list(states_XF.chunk(len(self.taps), -1)))

    def loss(
        self, rows_S: Sequence[Rows], last_PH: Tensor, output: Output, losses: Mapping[str, float]
    ) -> tuple[Tensor, list[Tensor]]:
        return self.lm_head(rows_S, last_PH, output, losses)
