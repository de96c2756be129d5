"""Which rows a head is served on, what it has to predict there, and how it fared (methods.md, sections 3 and 4).

Head (or step) k at row t is about token t + 2 + k, and counts iff tokens t + 1 .. t + 2 + k were all written by the assistant in
one turn: the token t + 1 comes from the target, so where it was not written by it the head is never asked.

Shapes: T positions of one conversation, P packed rows (those whose NEXT token is the assistant's), K heads (or steps), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.losses import HeadOutput


def served_rows(turn_T: Tensor) -> tuple[Tensor, Tensor]:
    """(index_P, segment_P) of one conversation; `turn_T`: 0 where not supervised, else the number of the assistant's turn.

    `index_P` are the rows whose next token is the assistant's; `segment_P` numbers the unbroken runs of one turn from 0, so that
    neighbours in the pack are neighbours in the text exactly when they agree.
    """
    next_turn_T = turn_T[1:]
    index_P = next_turn_T.nonzero().squeeze(1)
    turn_P = next_turn_T[index_P]
    breaks_P = (index_P.diff() != 1) | (turn_P.diff() != 0)
    return index_P, F.pad(breaks_P.cumsum(0), (1, 0)) if len(index_P) else index_P


def served_labels(next_P: Tensor, segment_P: Tensor, num_heads: int) -> Tensor:
    """[P, K]: the token head k has to predict at each packed row, -1 where it is not served; `next_P` are the next tokens."""
    labels_PK = next_P.new_full((len(next_P), num_heads), -1)
    for k in range(num_heads):
        shift = k + 1
        same_P = segment_P[shift:] == segment_P[:-shift]
        labels_PK[: max(0, len(next_P) - shift), k] = torch.where(same_P, next_P[shift:], -1)
    return labels_PK


def draft_labels(labels_PK: Tensor, draft_ids_V: Tensor) -> Tensor:
    """[P, K]: labels as draft ids, -1 where not served or outside the draft vocabulary."""
    return torch.where(labels_PK >= 0, draft_ids_V[labels_PK.clamp(min=0)], -1)


def tally(
    numerators_K: Tensor, labels_PK: Tensor, draft_PK: Tensor, indices_K: Sequence[Tensor], hits_K: Sequence[Tensor]
) -> HeadOutput:
    """The figures of a pass: `hits_K[k]` says which of the packed rows `indices_K[k]` head k got right.

    A label outside the draft vocabulary is served and wrong.
    """
    right_PK = torch.zeros_like(labels_PK, dtype=torch.bool)
    for k, (index_R, hit_R) in enumerate(zip(indices_K, hits_K, strict=True)):
        right_PK[index_R, k] = hit_R
    served_PK = labels_PK >= 0
    accepted_PK = right_PK.cumprod(1).bool()
    reached_PK = served_PK & F.pad(accepted_PK, (1, -1), value=True)
    return HeadOutput(
        numerators_K,
        (draft_PK >= 0).sum(0),
        served_PK.sum(0),
        right_PK.sum(0),
        reached_PK.sum(0),
        (reached_PK & right_PK).sum(0),
    )
