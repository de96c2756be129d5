"""Losses over a draft vocabulary, computed in chunks so that logits never fill the memory.

Shapes: K heads (or steps), R rows of one head, P packed rows of a batch, H hidden, D draft vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Logits held at once, as a number of elements: 64 MiB in float32.
CHUNK_ELEMENTS = 2**24

TeacherLogits = Callable[[Tensor], Tensor]
"""[C, H] post-final-norm states -> [C, D] logits of the target's own output function over the draft vocabulary."""


class HeadOutput(NamedTuple):
    """What one forward call of a head returns; sums, never means, so that they add up over batches and processes.

    `numerators_K` carries the gradient; `counts_K` are the rows it sums over. The accuracies count every served row: `served_K`,
    `correct_K` of them, `reached_K` whose earlier heads were all right, `accepted_K` of those right too. A label outside the
    draft vocabulary is served and wrong, and takes no part in the loss.
    """

    numerators_K: Tensor
    counts_K: Tensor
    served_K: Tensor
    correct_K: Tensor
    reached_K: Tensor
    accepted_K: Tensor


class Rows(NamedTuple):
    """The rows of one head: states x_RH, labels_R (draft ids) and slots_R, ascending: the packed row that holds the teacher."""

    x_RH: Tensor
    labels_R: Tensor
    slots_R: Tensor


def draft_loss(
    rows_K: Sequence[Rows],
    weight: Tensor,
    last_PH: Tensor,
    teacher: TeacherLogits | None = None,
    soft: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """Sum over rows of (1 - soft) * CE(label) + soft * KL(teacher || draft), per head, and whether each row's argmax is right.

    `weight` is [K, D, H], or [D, H] when the heads share it. The gradient is formed chunk by chunk in the forward pass, so that
    neither logits nor laws are kept for the backward. Rows are taken in order of their teacher's position: one teacher
    law serves all heads. Returns numerators_K (float32) and per head a bool tensor [R].
    """
    numerators_K, *hits = _DraftLoss.apply(
        weight, rows_K, last_PH, teacher, soft, torch.is_grad_enabled(), *(rows.x_RH for rows in rows_K)
    )
    return numerators_K, hits


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        rows_K: Sequence[Rows],
        last_PH: Tensor,
        teacher: TeacherLogits | None,
        soft: float,
        with_grad: bool,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            compute_weight = weight.to(dtype)
            weights_K = list(compute_weight) if weight.dim() == 3 else [compute_weight] * len(rows_K)
            grad_weight_KDH = None
            if with_grad and weight.requires_grad:
                grad_weight_KDH = weight.new_zeros((len(rows_K), *weight.shape[-2:]), dtype=torch.float32)
            sums = [
                _HeadSums.new(rows, states_k, dtype, with_grad) for rows, states_k in zip(rows_K, states, strict=True)
            ]
            for start, stop, bounds_K in _chunks(rows_K, len(last_PH), weight.shape[-2]):
                law = _Law.of(teacher(last_PH[start:stop]), start) if teacher is not None and soft else None
                for k, (low, high) in enumerate(bounds_K):
                    grad_DH = grad_weight_KDH[k] if grad_weight_KDH is not None else None
                    sums[k].add(rows_K[k], slice(low, high), weights_K[k], law, soft, grad_DH)
        ctx.grad_weight_KDH, ctx.weight_shape, ctx.weight_dtype = grad_weight_KDH, weight.shape, weight.dtype
        ctx.grad_states = [head.grad_RH for head in sums]
        hits = [head.hit_R for head in sums]
        ctx.mark_non_differentiable(*hits)
        return torch.stack([head.numerator for head in sums]), *hits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale_K = grads[0]
        if ctx.grad_states is None:
            raise RuntimeError("draft_loss: its gradient was used up by an earlier backward; run the forward again")
        # The buffers are scaled in place and handed over, so they cannot serve a second backward.
        states = [
            grad_RH.mul_(scale.to(grad_RH.dtype)) if grad_RH is not None else None
            for grad_RH, scale in zip(ctx.grad_states, scale_K, strict=True)
        ]
        weight = ctx.grad_weight_KDH
        if weight is not None:
            weight.mul_(scale_K.view(-1, 1, 1))
            weight = (weight if len(ctx.weight_shape) == 3 else weight.sum(0)).to(ctx.weight_dtype)
        ctx.grad_states = ctx.grad_weight_KDH = None
        return weight, None, None, None, None, None, *states


class _Law(NamedTuple):
    """The teacher's law and its entropy at the packed rows from `start` on; made once and used by every head."""

    law_CD: Tensor
    entropy_C: Tensor
    start: int

    @classmethod
    def of(cls, logits_CD: Tensor, start: int) -> _Law:
        log_law_CD = logits_CD.float().log_softmax(-1)
        law_CD = log_law_CD.exp()
        return cls(law_CD, -(law_CD * log_law_CD).sum(-1), start)


class _HeadSums:
    """Running sums of one head over the chunks of a batch."""

    def __init__(self, x_RH: Tensor, numerator: Tensor, hit_R: Tensor, grad_RH: Tensor | None) -> None:
        self.x_RH, self.numerator, self.hit_R, self.grad_RH = x_RH, numerator, hit_R, grad_RH

    @classmethod
    def new(cls, rows: Rows, states_RH: Tensor, dtype: torch.dtype, with_grad: bool) -> _HeadSums:
        device = states_RH.device
        return cls(
            states_RH.to(dtype),
            torch.zeros((), dtype=torch.float32, device=device),
            torch.zeros(len(rows.labels_R), dtype=torch.bool, device=device),
            torch.empty_like(states_RH) if with_grad and states_RH.requires_grad else None,
        )

    def add(
        self,
        rows: Rows,
        span: slice,
        weight_DH: Tensor,
        law: _Law | None,
        soft: float,
        grad_DH: Tensor | None,
    ) -> None:
        """Add the rows of `span`, whose teachers are all in `law`."""
        x_CH, labels_C1 = self.x_RH[span], rows.labels_R[span].unsqueeze(1)
        logits_CD = (x_CH @ weight_DH.T).float()
        self.hit_R[span] = logits_CD.argmax(-1) == labels_C1.squeeze(1)
        log_z_C1 = logits_CD.logsumexp(-1, keepdim=True)
        self.numerator += (1 - soft) * (log_z_C1 - logits_CD.gather(1, labels_C1)).sum()
        law_rows_CD = None
        if law is not None:
            index_C = rows.slots_R[span] - law.start
            law_rows_CD = law.law_CD[index_C]
            cross_C = log_z_C1.squeeze(1) - (law_rows_CD * logits_CD).sum(-1)
            self.numerator += soft * (cross_C - law.entropy_C[index_C]).sum()
        if self.grad_RH is None and grad_DH is None:
            return
        # d loss / d logits = q - (1 - soft) * onehot - soft * p
        error_CD = logits_CD.sub_(log_z_C1).exp_()
        error_CD.scatter_add_(1, labels_C1, error_CD.new_full(labels_C1.shape, soft - 1.0))
        if law_rows_CD is not None:
            error_CD.sub_(law_rows_CD, alpha=soft)
        error_CD = error_CD.to(weight_DH.dtype)
        if self.grad_RH is not None:
            self.grad_RH[span] = (error_CD @ weight_DH).to(self.grad_RH.dtype)
        if grad_DH is not None:
            if grad_DH.dtype == error_CD.dtype:
                grad_DH.addmm_(error_CD.T, x_CH)
            else:
                grad_DH.add_(error_CD.T @ x_CH)


def _chunks(rows_K: Sequence[Rows], packed: int, draft_size: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Ranges of packed rows, each with every head's range of rows whose teacher lies in it."""
    size = max(1, CHUNK_ELEMENTS // draft_size)
    starts = list(range(0, packed, size))
    edges = torch.tensor([*starts, packed], dtype=torch.int64, device=rows_K[0].slots_R.device)
    bounds_KE = torch.stack([torch.searchsorted(rows.slots_R, edges) for rows in rows_K]).tolist()
    return [
        (start, min(start + size, packed), [(edges_E[i], edges_E[i + 1]) for edges_E in bounds_KE])
        for i, start in enumerate(starts)
    ]
