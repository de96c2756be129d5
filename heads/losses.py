"""Losses over a draft vocabulary, computed in chunks so that logits never fill the memory.

Shapes: K heads (or steps), R rows of one head, P packed rows of a batch, H hidden, D draft vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.divergences import LawRows, Teacher, best, mix, needs_teacher

# Logits of one step held at once, as a number of elements. On a CPU the law, its logarithm and the teacher's stay in the
# cache that way; on a GPU larger products are faster.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**24}
CROSS_ENTROPY: Mapping[str, float] = MappingProxyType({"ce": 1.0})

Output = Callable[[Tensor], Tensor]
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
    output: Tensor | Output,
    last_PH: Tensor,
    teacher: Output | None = None,
    losses: Mapping[str, float] = CROSS_ENTROPY,
) -> tuple[Tensor, list[Tensor]]:
    """Sum over rows of the weighted `losses` (heads/divergences.py), per head, and whether each row's argmax is its label.

    `output` is what makes logits of states: a weight [K, D, H], or [D, H] when the heads share it; or a frozen function,
    through which the states' gradient goes. `teacher` is not needed for "ce" alone. The gradient is formed chunk by
    chunk in the forward pass, so that neither logits nor laws are kept for the backward. Rows are taken in order of their
    teacher's position: one teacher law serves all heads. Returns numerators_K (float32) and per head a bool tensor [R].
    """
    weight, function = (output, None) if isinstance(output, Tensor) else (None, output)
    numerators_K, *hits = _DraftLoss.apply(
        weight,
        function,
        rows_K,
        last_PH,
        teacher if needs_teacher(losses) else None,
        losses,
        torch.is_grad_enabled(),
        *(rows.x_RH for rows in rows_K),
    )
    return numerators_K, hits


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor | None,
        function: Output | None,
        rows_K: Sequence[Rows],
        last_PH: Tensor,
        teacher: Output | None,
        losses: Mapping[str, float],
        with_grad: bool,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        device = last_PH.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        with torch.autocast(device, enabled=False):
            if weight is not None:
                project: _Weight | _Function = _Weight(weight, autocast or weight.dtype, len(rows_K), with_grad)
            else:
                assert function is not None
                project = _Function(function, with_grad)
            heads = enumerate(zip(rows_K, states, strict=True))
            sums = [_HeadSums(k, rows, x_RH, project, with_grad) for k, (rows, x_RH) in heads]
            for start, stop, bounds_K in _chunks(rows_K, len(last_PH), project.size(last_PH)):
                law = Teacher(teacher(last_PH[start:stop])) if teacher is not None else None
                for head, (low, high) in zip(sums, bounds_K, strict=True):
                    if high > low:
                        head.add(slice(low, high), law, start, losses)
        ctx.project, ctx.grad_states = project, [head.grad_RH for head in sums]
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
        weight = ctx.project.gradient(scale_K)
        ctx.grad_states = ctx.project = None
        return weight, None, None, None, None, None, None, *states


class _Weight:
    """Logits by a weight [K, D, H] or [D, H], and the sums of its gradient."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, heads: int, with_grad: bool) -> None:
        self._weight, compute = weight, weight.to(dtype)
        self._weights_K = list(compute) if weight.dim() == 3 else [compute] * heads
        self._grad_KDH = None
        if with_grad and weight.requires_grad:
            self._grad_KDH = weight.new_zeros((heads, *weight.shape[-2:]), dtype=torch.float32)

    def size(self, last_PH: Tensor) -> int:
        return self._weight.shape[-2]

    def logits(self, k: int, x_CH: Tensor) -> tuple[Tensor, Tensor]:
        """(the states in the dtype of the product, logits [C, D])."""
        x_CH = x_CH.to(self._weights_K[k].dtype)
        return x_CH, x_CH @ self._weights_K[k].T

    def pull_back(self, k: int, x_CH: Tensor, logits_CD: Tensor, error_CD: Tensor) -> Tensor:
        """The gradient of the logits -> that of the states; the weight's is added up."""
        error_CD = error_CD.to(x_CH.dtype)
        if self._grad_KDH is not None:
            if error_CD.dtype == torch.float32:
                self._grad_KDH[k].addmm_(error_CD.T, x_CH)
            else:
                self._grad_KDH[k].add_(error_CD.T @ x_CH)
        return error_CD @ self._weights_K[k]

    def gradient(self, scale_K: Tensor) -> Tensor | None:
        """Of the weight; heads that share it have different scales, so their sums were kept apart."""
        if self._grad_KDH is None:
            return None
        grad_KDH = self._grad_KDH.mul_(scale_K.view(-1, 1, 1))
        return (grad_KDH if self._weight.dim() == 3 else grad_KDH.sum(0)).to(self._weight.dtype)


class _Function:
    """Logits by a frozen function."""

    def __init__(self, function: Output, with_grad: bool) -> None:
        self._function, self._with_grad = function, with_grad

    def size(self, last_PH: Tensor) -> int:
        return self._function(last_PH[:1]).shape[-1] if len(last_PH) else 1

    def logits(self, k: int, x_CH: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(self._with_grad):
            x_CH = x_CH.detach().requires_grad_(self._with_grad)
            return x_CH, self._function(x_CH)

    def pull_back(self, k: int, x_CH: Tensor, logits_CD: Tensor, error_CD: Tensor) -> Tensor:
        return torch.autograd.grad(logits_CD, x_CH, error_CD.to(logits_CD.dtype))[0]

    def gradient(self, scale_K: Tensor) -> None:
        return None


class _HeadSums:
    """Running sums of one head over the chunks of a batch."""

    def __init__(self, k: int, rows: Rows, x_RH: Tensor, project: _Weight | _Function, with_grad: bool) -> None:
        self._k, self._rows, self._x_RH, self._project, self._with_grad = k, rows, x_RH, project, with_grad
        self.numerator = torch.zeros((), dtype=torch.float32, device=x_RH.device)
        self.hit_R = torch.zeros(len(x_RH), dtype=torch.bool, device=x_RH.device)
        self.grad_RH = torch.empty_like(x_RH) if with_grad and x_RH.requires_grad else None

    def add(self, span: slice, law: Teacher | None, start: int, losses: Mapping[str, float]) -> None:
        """Add the rows of `span`, whose teachers are the rows of `law`, the first of which is slot `start`."""
        labels_C = self._rows.labels_R[span]
        x_CH, made_CD = self._project.logits(self._k, self._x_RH[span])
        logits_CD = made_CD.detach().float()
        self.hit_R[span] = best(logits_CD) == labels_C
        rows = LawRows(logits_CD, labels_C, law, self._rows.slots_R[span] - start)
        total, error_CD = mix(rows, losses, self._with_grad)
        self.numerator += total
        if error_CD is not None:
            grad_CH = self._project.pull_back(self._k, x_CH, made_CD, error_CD)
            if self.grad_RH is not None:
                self.grad_RH[span] = grad_CH.to(self.grad_RH.dtype)


def _chunks(rows_K: Sequence[Rows], packed: int, draft_size: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Ranges of packed rows, each with every head's range of rows whose teacher lies in it."""
    size = max(1, CHUNK_ELEMENTS.get(rows_K[0].slots_R.device.type, CHUNK_ELEMENTS["cuda"]) // draft_size)
    starts = list(range(0, packed, size))
    edges = torch.tensor([*starts, packed], dtype=torch.int64, device=rows_K[0].slots_R.device)
    bounds_KE = torch.stack([torch.searchsorted(rows.slots_R, edges) for rows in rows_K]).tolist()
    return [
        (start, min(start + size, packed), [(edges_E[i], edges_E[i + 1]) for edges_E in bounds_KE])
        for i, start in enumerate(starts)
    ]
