"""The draft vocabulary: the part of the target's vocabulary that a head can propose (methods.md, section 4).

It belongs to the checkpoint: chosen once, stored with the head as `d2t` and `t2d`, never rebuilt on resume or fine-tuning.

Shapes: V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.errors import HeadwayError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftVocabulary:
    """`ids_D`: the target's ids in ascending order (int64); draft id i stands for target id `ids_D[i]`."""

    ids_D: Tensor
    vocab_size: int

    @property
    def size(self) -> int:
        return len(self.ids_D)

    @property
    def full(self) -> bool:
        """Whether D == V, in which case no maps are written."""
        return self.size == self.vocab_size

    @property
    def d2t(self) -> Tensor:
        """Offsets [D], int64: target id = i + d2t[i]."""
        return self.ids_D - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        """Mask [V], bool: which target ids can be drafted."""
        mask_V = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask_V[self.ids_D] = True
        return mask_V

    def coverage(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that can be drafted at all; 1 when nothing was counted."""
        total = int(counts_V.sum())
        return int(counts_V[self.ids_D].sum()) / total if total else 1.0


def choose_vocabulary(counts_V: Tensor, size: int | None, special_ids: Iterable[int]) -> DraftVocabulary:
    """The `size` most frequent supervised tokens; special tokens always kept; ties go to the smaller id.

    `counts_V` [V] int64: how often each target token was supervised. `size` null or V means the full vocabulary. When fewer
    than `size` distinct tokens were seen, the unseen ones of smallest id fill up, which the log says.
    Raises HeadwayError when `size` is not in 1..V or cannot hold the special tokens.
    """
    vocab_size = len(counts_V)
    size = vocab_size if size is None else size
    special = sorted({i for i in special_ids if 0 <= i < vocab_size})
    if not 0 < size <= vocab_size:
        raise HeadwayError(
            f"head.draft_vocab_size: {size} is not between 1 and the target's {vocab_size} tokens; "
            "give a number in that range, or null for the full vocabulary"
        )
    if len(special) > size:
        raise HeadwayError(
            f"head.draft_vocab_size: {size} cannot hold the target's {len(special)} special tokens; give more than that"
        )
    # Special tokens come first whatever their count; a stable sort keeps ties, and the unseen tokens, in order of id.
    rank_V = counts_V.to(torch.int64).clone()
    rank_V[torch.tensor(special, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    ids_D = torch.sort(rank_V, descending=True, stable=True).indices[:size].sort().values
    unseen = int((rank_V[ids_D] == 0).sum())
    if unseen and size < vocab_size:
        log.warning(
            "draft vocabulary: only %d of its %d tokens were seen; filled with the %d unseen tokens of smallest id",
            size - unseen,
            size,
            unseen,
        )
    return DraftVocabulary(ids_D, vocab_size)
