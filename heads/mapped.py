"""A head that proposes ids of a draft vocabulary, whose map is part of its checkpoint.

Shapes: V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.checkpoint import Head, HeadConfig
from heads.errors import HeadwayError
from heads.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class MappedConfig(HeadConfig):
    """`draft_vocab_size` null = the full vocabulary."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        draft = self.draft_vocab_size
        if draft is not None and not (isinstance(draft, int) and 0 < draft <= self.vocab_size):
            raise HeadwayError(f"draft_vocab_size: {draft!r} is neither null nor within 1..{self.vocab_size}")

    @property
    def mapped(self) -> bool:
        """Whether draft ids differ from target ids, so that maps are stored."""
        return self.draft_vocab_size is not None and self.draft_vocab_size < self.vocab_size

    @property
    def output_size(self) -> int:
        return self.draft_vocab_size or self.vocab_size


class MappedHead(Head):
    """Its `d2t` [D] (offsets) and `t2d` [V] (mask) exist where the draft vocabulary is a part of the target's."""

    config: MappedConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: MappedConfig) -> None:
        super().__init__(config)
        if config.mapped:
            self.register_buffer("d2t", torch.zeros(config.output_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def set_vocabulary(self, vocabulary: DraftVocabulary) -> None:
        """Take over the map. Raises HeadwayError when its sizes are not the head's."""
        config = self.config
        if vocabulary.size != config.output_size or vocabulary.vocab_size != config.vocab_size:
            raise HeadwayError(
                f"draft vocabulary: {vocabulary.size} of {vocabulary.vocab_size} tokens do not fit a head with "
                f"{config.output_size} of {config.vocab_size}; choose the vocabulary with the head's sizes"
            )
        if config.mapped:
            self.d2t.copy_(vocabulary.d2t)
            self.t2d.copy_(vocabulary.t2d)

    def start_as_target(self, weight: Tensor, lm_head_VH: Tensor, vocabulary: DraftVocabulary) -> None:
        """Take over the map, and let the output matrices `weight` [..., D, H] be the rows of the target's, in float32."""
        self.set_vocabulary(vocabulary)
        with torch.no_grad():
            weight.copy_(lm_head_VH[vocabulary.ids_D.to(lm_head_VH.device)].float())

    def vocabulary(self) -> DraftVocabulary:
        """The head's own map."""
        return DraftVocabulary(self.target_ids().cpu(), self.config.vocab_size)

    def check(self) -> None:
        if not self.config.mapped:
            return
        ids_D = self.target_ids()
        inside = bool(((ids_D >= 0) & (ids_D < self.config.vocab_size)).all())
        if not inside or len(ids_D.unique()) != len(ids_D):
            raise HeadwayError("`d2t` gives ids outside the vocabulary, or one id twice; the head cannot be used")
        if int(self.t2d.sum()) != len(ids_D) or not bool(self.t2d[ids_D].all()):
            raise HeadwayError("`t2d` does not mark the ids that `d2t` gives; the head cannot be used")

    def target_ids(self) -> Tensor:
        """[D]: the target id of each draft id."""
        if not self.config.mapped:
            return torch.arange(self.config.output_size, device=next(self.parameters()).device)
        return torch.arange(self.config.output_size, device=self.d2t.device) + self.d2t

    def draft_ids_of(self) -> Tensor:
        """[V]: the draft id of each target id, -1 for those outside the draft vocabulary."""
        ids_D = self.target_ids()
        inverse_V = ids_D.new_full((self.config.vocab_size,), -1)
        inverse_V[ids_D] = torch.arange(len(ids_D), device=ids_D.device)
        return inverse_V
