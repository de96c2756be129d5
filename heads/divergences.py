"""What a draft's law is held against the target's law with, each with its gradient in closed form.

q is the draft's law, p the target's over the same draft vocabulary, renormalised there (methods.md, section 4). Each function
gives the values of some rows and their `pull` = -q * dL/dq, from which dL/dlogits = q * sum(pull) - pull.

Shapes: C rows of a chunk, D draft vocabulary, T best tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from heads.errors import HeadwayError

TOP_TOKENS = 10
BLOCK = 128


class Teacher:
    """The target's law at some positions, made of its logits [C, D]; what only some losses need is made when asked for."""

    def __init__(self, logits_CD: Tensor) -> None:
        self._logits_CD = logits_CD.float()
        self.p_CD = self._logits_CD.softmax(-1)
        self._log_z_C1 = log_z(self._logits_CD, self.p_CD)

    @cached_property
    def negative_entropy_C(self) -> Tensor:
        return dot(self.p_CD, self._logits_CD) - self._log_z_C1.squeeze(1)

    @cached_property
    def log_p_CD(self) -> Tensor:
        return self._logits_CD - self._log_z_C1

    @cached_property
    def top(self) -> tuple[Tensor, Tensor]:
        """[C, T] indices and probabilities of the most probable tokens."""
        values_CT, index_CT = self.p_CD.topk(min(TOP_TOKENS, self.p_CD.shape[-1]), -1)
        return index_CT, values_CT


class LawRows:
    """The rows of one head in a chunk: their law q, labels [C] (draft ids), and which of the teacher's rows is theirs."""

    def __init__(self, logits_CD: Tensor, labels_C: Tensor, teacher: Teacher | None, index_C: Tensor) -> None:
        self.logits_CD, self.labels_C = logits_CD, labels_C
        self.q_CD = logits_CD.softmax(-1)
        self.log_z_C1 = log_z(logits_CD, self.q_CD)
        self._teacher, self._index_C = teacher, index_C
        # indices ascend without repetition, so as many as the teacher has are all of them, in order
        self._in_place = teacher is not None and len(index_C) == len(teacher.p_CD)

    @cached_property
    def log_q_CD(self) -> Tensor:
        return self.logits_CD - self.log_z_C1

    @property
    def teacher(self) -> Teacher:
        if self._teacher is None:
            raise ValueError("this loss needs the target's law; give a teacher")
        return self._teacher

    def of_teacher(self, values: Tensor) -> Tensor:
        """The rows of a tensor of the teacher that belong to these."""
        return values if self._in_place else values.index_select(0, self._index_C)

    @cached_property
    def p_CD(self) -> Tensor:
        return self.of_teacher(self.teacher.p_CD)


def log_z(logits_CD: Tensor, law_CD: Tensor) -> Tensor:
    """[C, 1]: the logarithm of the law's denominator, from its largest token: two passes fewer than a log-sum-exp."""
    return logits_CD.amax(-1, keepdim=True) - law_CD.amax(-1, keepdim=True).log()


def best(logits_CD: Tensor) -> Tensor:
    """[C]: argmax, the first one among equals. By blocks: a CPU finds the largest value ten times as fast as its place."""
    if logits_CD.shape[-1] % BLOCK:
        return logits_CD.argmax(-1)
    blocks_CXY = logits_CD.unflatten(-1, (-1, BLOCK))
    block_C = blocks_CXY.amax(-1).argmax(-1)
    inside_CY = blocks_CXY[torch.arange(len(block_C), device=block_C.device), block_C]
    return block_C * BLOCK + inside_CY.argmax(-1)


class Term(NamedTuple):
    """A loss of some rows: its values, and its pull, dense or at some columns; `total` is the pull's sum over the columns."""

    value_C: Tensor
    total: Tensor | float
    pull_CD: Tensor | None = None
    columns: tuple[Tensor, Tensor] | None = None


def dot(a_CD: Tensor, b_CD: Tensor) -> Tensor:
    """[C]: the rows' products."""
    return torch.linalg.vecdot(a_CD, b_CD)


def cross_entropy(rows: LawRows) -> Term:
    """-log q(label)."""
    index_C1 = rows.labels_C.unsqueeze(1)
    value_C1 = rows.log_z_C1 - rows.logits_CD.gather(1, index_C1)
    return Term(value_C1.squeeze(1), 1.0, columns=(index_C1, torch.ones_like(value_C1)))


def kl(rows: LawRows) -> Term:
    """KL(p || q) = sum p log(p / q)."""
    negative_entropy_C = rows.of_teacher(rows.teacher.negative_entropy_C)
    cross_entropy_C = rows.log_z_C1.squeeze(1) - dot(rows.p_CD, rows.logits_CD)
    return Term(negative_entropy_C + cross_entropy_C, 1.0, rows.p_CD)


def reverse_kl(rows: LawRows) -> Term:
    """KL(q || p) = sum q log(q / p)."""
    pull_CD = rows.of_teacher(rows.teacher.log_p_CD).sub(rows.log_q_CD).mul_(rows.q_CD)
    total_C = pull_CD.sum(-1)
    return Term(-total_C, total_C.unsqueeze(1), pull_CD)


def total_variation(rows: LawRows) -> Term:
    """sum |p - q| / 2."""
    difference_CD = rows.p_CD - rows.q_CD
    value_C = 0.5 * difference_CD.abs().sum(-1)
    pull_CD = difference_CD.sign_().mul_(rows.q_CD).mul_(0.5)
    return Term(value_C, pull_CD.sum(-1, keepdim=True), pull_CD)


def jensen_shannon(rows: LawRows) -> Term:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    log_m_CD = (0.5 * (rows.p_CD + rows.q_CD)).log_()
    from_p_C = rows.of_teacher(rows.teacher.negative_entropy_C) - dot(rows.p_CD, log_m_CD)
    pull_CD = log_m_CD.sub_(rows.log_q_CD).mul_(rows.q_CD).mul_(0.5)
    total_C = pull_CD.sum(-1)
    return Term(0.5 * from_p_C - total_C, total_C.unsqueeze(1), pull_CD)


def overlap(rows: LawRows) -> Term:
    """-log sum min(p, q): the negative logarithm of a sampled draft's acceptance."""
    overlap_C1 = torch.minimum(rows.p_CD, rows.q_CD).sum(-1, keepdim=True)
    overlap_C1.clamp_(min=torch.finfo(overlap_C1.dtype).tiny)
    pull_CD = torch.where(rows.q_CD < rows.p_CD, rows.q_CD, 0.0).div_(overlap_C1)
    return Term(-overlap_C1.log().squeeze(1), pull_CD.sum(-1, keepdim=True), pull_CD)


def top_tokens(rows: LawRows) -> Term:
    """-sum p log q over the TOP_TOKENS most probable tokens of p (HASS: Zhang et al. 2024, section 3.1)."""
    index_CT, p_CT = (rows.of_teacher(part) for part in rows.teacher.top)
    value_C = (p_CT * (rows.log_z_C1 - rows.logits_CD.gather(1, index_CT))).sum(-1)
    return Term(value_C, p_CT.sum(-1, keepdim=True), columns=(index_CT, p_CT))


DIVERGENCES: dict[str, Callable[[LawRows], Term]] = {
    "ce": cross_entropy,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "js": jensen_shannon,
    "lk": overlap,
    "top_k": top_tokens,
}
FEATURES = "smooth_l1"
"""The loss on predicted states, for heads that predict them."""


def needs_teacher(losses: Mapping[str, float]) -> bool:
    """Whether any of these looks at the target's law."""
    return any(name in DIVERGENCES and name != "ce" for name in losses)


def check_losses(losses: Mapping[str, float], features: bool = False) -> None:
    """Raise HeadwayError for an unknown name, a weight that is not above 0, no loss on the law; `features`: smooth_l1 is known."""
    known = [*DIVERGENCES, *([FEATURES] if features else [])]
    for name, weight in losses.items():
        if name not in known:
            raise HeadwayError(f"recipe: head.losses: '{name}' is unknown; known: {', '.join(known)}")
        if not 0 < weight < float("inf"):
            raise HeadwayError(f"recipe: head.losses.{name} is {weight}; it must be above 0, or left out")
    if not any(name in DIVERGENCES for name in losses):
        raise HeadwayError(f"recipe: head.losses: names no loss on the drafted law; known: {', '.join(DIVERGENCES)}")


def mix(rows: LawRows, losses: Mapping[str, float], with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """(sum over rows of the weighted losses, their gradient with respect to the logits [C, D] or None).

    The rows' law is used up by the gradient.
    """
    terms = [(weight, DIVERGENCES[name](rows)) for name, weight in losses.items()]
    total = torch.stack([weight * term.value_C.sum() for weight, term in terms]).sum()
    if not with_grad:
        return total, None
    factor = sum(weight * term.total for weight, term in terms)
    error_CD = rows.q_CD.mul_(factor) if not (isinstance(factor, float) and factor == 1.0) else rows.q_CD
    for weight, term in terms:
        if term.pull_CD is not None:
            error_CD.sub_(term.pull_CD, alpha=weight)
        if term.columns is not None:
            index, values = term.columns
            error_CD.scatter_add_(1, index, values * -weight)
    return total, error_CD
