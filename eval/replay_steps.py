"""A head's draft steps over a text that the target wrote, all rows at once: what drafting would see had it come that far.

Row t is where the target's last known state is position t: the root is token t + 1, and step s (from 0) is about token
t + 2 + s, behind the text's own tokens. Only rows whose root the assistant wrote are asked (heads/served.py).

Shapes: T positions of a text, P packed rows (whose next token is the assistant's), R rows of a chunk, S steps, H hidden,
D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from data_prep.store import StoredConversation
from eval.drafters.eagle_passes import drafts_left
from heads.checkpoint import Head
from heads.eagle import EagleHead
from heads.errors import HeadwayError
from heads.mapped import MappedHead
from heads.medusa import MedusaHead, embedded
from heads.served import draft_labels, served_labels, served_rows
from heads.target import Target, TargetEnds
from heads.unroll import schedule


@dataclass(frozen=True)
class TextRows:
    """The rows of one text: positions `index_P`, unbroken runs of one turn `segment_P`, and tokens to draft.

    `labels_PS`: target ids, -1 where the turn has ended before; `draft_PS`: draft ids, -1 there and outside the draft
    vocabulary; `reach_P`: steps that the head's positions allow.
    """

    index_P: Tensor
    segment_P: Tensor
    labels_PS: Tensor
    draft_PS: Tensor
    reach_P: Tensor

    @staticmethod
    def of(stored: StoredConversation, head: MappedHead, steps: int) -> TextRows:
        """On the head's device."""
        draft_ids_V = head.draft_ids_of()
        index_P, segment_P = (part.to(draft_ids_V.device) for part in served_rows(stored.turn_T))
        ids_T = stored.ids_T.to(draft_ids_V.device)
        labels_PS = served_labels(ids_T[index_P + 1], segment_P, steps)
        reach_P = torch.full_like(index_P, steps)
        if isinstance(head, EagleHead):
            # a text of t + 2 tokens, its root included
            reach_P = (drafts_left(head.config.max_position_embeddings, 2) - index_P).clamp(0, steps)
        return TextRows(index_P, segment_P, labels_PS, draft_labels(labels_PS, draft_ids_V), reach_P)


class TextSteps(Protocol):
    """A head over one text."""

    def logits(self, step: int, packed_R: Tensor) -> Tensor:
        """[R, D]: the draft's logits of `step` at packed rows, in ascending order, where that step is served."""


class MedusaSteps:
    """Head k is step k; a Hydra head sees the text's tokens where drafting would see drafts that were right."""

    def __init__(self, head: MedusaHead, ends: TargetEnds, stored: StoredConversation, rows: TextRows) -> None:
        weight = head.lm_head.weight
        self._head, self._last_PH = head, stored.last_TH.to(weight.device)[rows.index_P].to(weight.dtype)
        self._next_PH: Tensor | None = None
        if head.config.hydra:
            ids_T = stored.ids_T.to(weight.device)
            self._next_PH = embedded(ends.embed, ids_T[rows.index_P + 1], self._last_PH)

    def logits(self, step: int, packed_R: Tensor) -> Tensor:
        seen = () if self._next_PH is None else [self._next_PH[packed_R + back] for back in range(step + 1)]
        return self._head.lm_head.head_logits(step, self._head.blocks[step](self._last_PH[packed_R], seen))


class EagleSteps:
    """The training-time test: keys of true states, and of what the row itself made up."""

    def __init__(self, head: EagleHead, ends: TargetEnds, stored: StoredConversation, rows: TextRows) -> None:
        device, dtype = rows.index_P.device, ends.lm_head_weight.dtype
        ids_T, last_TH = stored.ids_T.to(device), stored.last_TH.to(device)
        features_TH = head.features(last_TH, {tap: stored.taps[tap].to(device) for tap in head.taps})
        plan = schedule([len(ids_T)], rows.index_P, rows.labels_PS)
        self._hidden_S = head.unroll(features_TH, ends.embed(ids_T), plan)
        self._packed_S = [step.packed_R for step in plan.steps]
        self._head, self._output = head, lambda hidden: ends.logits(hidden.to(dtype))

    def logits(self, step: int, packed_R: Tensor) -> Tensor:
        place_R = torch.searchsorted(self._packed_S[step], packed_R)
        return self._head.logits(self._hidden_S[step][place_R], self._output)


def most_steps(head: Head) -> int | None:
    """How many steps the head has; None: as many as are asked for. Raises HeadwayError for a head that cannot be replayed."""
    if isinstance(head, MedusaHead):
        return head.config.num_heads
    if isinstance(head, EagleHead):
        return None
    raise HeadwayError(f"a head of kind '{head.config.kind}' cannot be replayed; Medusa and EAGLE heads can")


def steps_over(head: Head, ends: TargetEnds, stored: StoredConversation, steps: int) -> tuple[TextRows, TextSteps]:
    """The rows of one text and the head over it. Raises HeadwayError for more steps than the head has."""
    most = most_steps(head)
    if steps < 1 or (most is not None and steps > most):
        raise HeadwayError(f"replay of {steps} steps: this head has {f'1 to {most}' if most else 'at least 1'}")
    assert isinstance(head, MappedHead)
    rows = TextRows.of(stored, head, steps)
    made: TextSteps
    if isinstance(head, MedusaHead):
        made = MedusaSteps(head, ends, stored, rows)
    else:
        assert isinstance(head, EagleHead)
        made = EagleSteps(head, ends, stored, rows)
    return rows, made


def stored_text(target: Target, name: str, ids: list[int], turns: list[int]) -> StoredConversation:
    """A text as a feature store would keep it, by one pass of the target; every layer's input is a tap.

    `turns`: 0 for tokens that were given, else the number of the assistant's turn that the token belongs to.
    """
    states = target.states(torch.tensor([ids], device=target.device), taps=range(target.num_layers))
    logits_TV = target.logits(states.last[0])
    return StoredConversation(
        id=name,
        ids_T=torch.tensor(ids),
        turn_T=torch.tensor(turns),
        last_TH=states.last[0].cpu(),
        taps={tap: found_BTH[0].cpu() for tap, found_BTH in states.taps.items()},
        top1_T=logits_TV.argmax(-1).cpu(),
        lse_T=logits_TV.logsumexp(-1).cpu(),
    )
