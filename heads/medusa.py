"""Medusa heads (methods.md, section 3; Cai et al. 2024, section 2.1): K one-pass predictions from the target's last state.

Head k (from 0) at position t predicts token t + 2 + k. It is served, and counts, only where tokens t + 1 .. t + 2 + k were all
written by the assistant in one turn.

Shapes: B rows, R gathered rows, T positions of one conversation, P packed positions, K heads, H hidden, V vocabulary, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.checkpoint import register
from heads.errors import HeadwayError
from heads.linear import few_rows_linear
from heads.losses import CROSS_ENTROPY, HeadOutput, Output, Rows, draft_loss
from heads.mapped import MappedConfig, MappedHead
from heads.served import draft_labels, served_labels, served_rows, tally
from heads.vocabulary import DraftVocabulary

Embed = Callable[[Tensor], Tensor]
"""[...] token ids -> [..., H]: the target's embedding."""


@dataclass(frozen=True)
class MedusaConfig(MappedConfig):
    """`output` "own" = a Linear(H -> D) per head, "shared" = one for all.

    `hydra`: head k also sees the embeddings of tokens t + 1 .. t + 1 + k, the root and the drafts before its own (Ankner
    et al. 2024, section 3).
    """

    num_heads: int = 4
    num_layers: int = 1
    output: Literal["own", "shared"] = "own"
    hydra: bool = False
    kind: ClassVar[str] = "medusa"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise HeadwayError(f"{name}: {value!r} is not a whole number above 0")
        super().__post_init__()
        if self.output not in ("own", "shared"):
            raise HeadwayError(f'output: {self.output!r} is neither "own" nor "shared"')


class ResidualLayer(nn.Linear):
    """x + SiLU(Linear(x)), the identity at the start: weight and bias are zero. Linear may see `more` states beside x."""

    def __init__(self, hidden_size: int, more: int = 0) -> None:
        super().__init__(hidden_size * (1 + more), hidden_size)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x_RH: Tensor, more: Sequence[Tensor] = ()) -> Tensor:
        return x_RH + F.silu(super().forward(torch.cat([x_RH, *more], 1) if more else x_RH))


class MedusaBlock(nn.Module):
    """The residual layers of one head, each a module of its own; the first one sees `more` states beside x."""

    def __init__(self, hidden_size: int, num_layers: int, more: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualLayer(hidden_size, 0 if number else more) for number in range(num_layers))

    def forward(self, x_RH: Tensor, more: Sequence[Tensor] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            x_RH = layer(x_RH, () if number else more)
        return x_RH


class DraftOutput(nn.Module):
    """The output matrices as one tensor, [K, D, H] or shared [D, H]: one matmul serves all heads when decoding."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        shape = (config.output_size, config.hidden_size)
        shared = config.output == "shared"
        self.weight = nn.Parameter(torch.zeros(shape if shared else (config.num_heads, *shape)), not shared)

    def forward(
        self, rows_K: Sequence[Rows], last_PH: Tensor, teacher: Output | None, losses: Mapping[str, float]
    ) -> tuple[Tensor, list[Tensor]]:
        """`draft_loss` over this weight, inside the module's forward, where ZeRO-3 has it gathered."""
        return draft_loss(rows_K, self.weight, last_PH, teacher, losses)

    def head_logits(self, k: int, x_RH: Tensor) -> Tensor:
        """[R, H] of head k -> [R, D]."""
        return few_rows_linear(x_RH, self.weight[k] if self.weight.dim() == 3 else self.weight)

    def logits(self, x_KRH: Tensor) -> Tensor:
        """[K, R, H] -> [R, K, D]."""
        if self.weight.dim() == 3:
            return torch.stack([few_rows_linear(x_RH, own) for x_RH, own in zip(x_KRH, self.weight, strict=True)], 1)
        return few_rows_linear(x_KRH, self.weight).transpose(0, 1)


@register
class MedusaHead(MappedHead):
    """K residual blocks and their output; see `MedusaConfig`."""

    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(
            MedusaBlock(config.hidden_size, config.num_layers, 1 + k if config.hydra else 0)
            for k in range(config.num_heads)
        )
        self.lm_head = DraftOutput(config)

    @classmethod
    def from_target(cls, config: MedusaConfig, lm_head_VH: Tensor, vocabulary: DraftVocabulary) -> MedusaHead:
        """A new head whose outputs start as the rows of the target's lm_head, in float32."""
        head = cls(config)
        head.start_as_target(head.lm_head.weight, lm_head_VH, vocabulary)
        return head

    def draft_logits(self, last_RH: Tensor) -> Tensor:
        """[R, H] post-final-norm states of the target -> [R, K, D]. Not for Hydra heads, which need the drafts before."""
        if self.config.hydra:
            raise HeadwayError("these Hydra heads draft one after the other; use draft_ids")
        return self.lm_head.logits(torch.stack([block(last_RH) for block in self.blocks]))

    def draft_ids(
        self, last_BH: Tensor, root_B: Tensor | None = None, embed: Embed | None = None, count: int | None = None
    ) -> Tensor:
        """[B, H] -> [B, K]: the first choices of the first `count` heads (None: all), as target ids.

        `root_B`: the token that the target drew after these states; `embed`: the target's embedding. Hydra heads need
        both, others look at neither.
        """
        if not self.config.hydra:
            return self._target_ids_of(self.draft_logits(last_BH).argmax(-1))[:, :count]
        if root_B is None or embed is None:
            raise HeadwayError("Hydra heads draft from the root token and the target's embedding; give both")
        seen, chosen = [embedded(embed, root_B, last_BH)], []
        for k, block in enumerate(self.blocks[:count]):
            chosen.append(self._target_ids_of(self.lm_head.head_logits(k, block(last_BH, seen)).argmax(-1)))
            seen.append(embedded(embed, chosen[-1], last_BH))
        return torch.stack(chosen, 1)

    def _target_ids_of(self, ids: Tensor) -> Tensor:
        return ids + self.d2t[ids] if self.config.mapped else ids

    def forward(
        self,
        last_PH: Tensor,
        next_P: Tensor,
        segment_P: Tensor,
        teacher: Output | None = None,
        losses: Mapping[str, float] = CROSS_ENTROPY,
        embed: Embed | None = None,
    ) -> HeadOutput:
        """One training pass over packed rows (see `pack`): loss numerators, counts and accuracies of every head.

        `embed`: the target's embedding, which Hydra heads need.
        `losses`: name -> weight, as in heads/divergences.py; `teacher`: what most of them compare with.
        Every head takes part even without a row, so that all processes see the same parameters used.
        """
        last_PH = last_PH.to(self.lm_head.weight.dtype)
        labels_PK = served_labels(next_P, segment_P, self.config.num_heads)
        draft_PK = draft_labels(labels_PK, self.draft_ids_of())
        indices_K = [(draft_PK[:, k] >= 0).nonzero().squeeze(1) for k in range(self.config.num_heads)]
        seen_PH = None
        if self.config.hydra:
            if embed is None:
                raise HeadwayError("Hydra heads are trained on the target's embeddings; none were given")
            seen_PH = embedded(embed, next_P, last_PH)

        def seen(index_R: Tensor, k: int) -> list[Tensor]:
            # a served row's tokens t + 1 .. t + 1 + k follow each other in the pack
            return [] if seen_PH is None else [seen_PH[index_R + back] for back in range(k + 1)]

        rows_K = [
            Rows(block(last_PH[index_R], seen(index_R, k)), draft_PK[index_R, k], index_R + 1 + k)
            for k, (block, index_R) in enumerate(zip(self.blocks, indices_K, strict=True))
        ]
        numerators_K, hits = self.lm_head(rows_K, last_PH, teacher, losses)
        return tally(numerators_K, labels_PK, draft_PK, indices_K, hits)


def embedded(embed: Embed, ids: Tensor, like: Tensor) -> Tensor:
    """[...] ids -> [..., H] in the dtype of `like`, scaled to unit mean square: raw embeddings are small beside states."""
    found = embed(ids).to(like.dtype)
    return F.rms_norm(found, found.shape[-1:])


def pack(last_TH: Tensor, ids_T: Tensor, turn_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of one conversation whose NEXT token is the assistant's: (last_PH, next_P, segment_P).

    As `served_rows` numbers them, from the turns of its tokens.
    """
    index_P, segment_P = served_rows(turn_T)
    return last_TH[index_P], ids_T[1:][index_P], segment_P
