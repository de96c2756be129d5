"""Sums over forward passes, and the figures made of them (metrics.md). Shapes: K heads (or steps)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.losses import HeadOutput


class Totals:
    """Adds up head outputs; sums are exact whatever the split over batches and processes."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self._sums_FK = torch.zeros(len(HeadOutput._fields), heads, dtype=torch.float64, device=device)

    def add(self, output: HeadOutput) -> None:
        self._sums_FK += torch.stack([field_K.detach().double() for field_K in output])

    def tensor(self) -> Tensor:
        """[fields, K] float64, to be summed over processes in place."""
        return self._sums_FK

    def figures(self, weights: Sequence[float]) -> dict[str, Any]:
        """The loss (weighted by head), and per head: loss, marginal and conditional accuracy; simulated tau."""
        numerators, counts, served, correct, reached, accepted = self._sums_FK.tolist()
        losses = [_ratio(n, d) for n, d in zip(numerators, counts, strict=True)]
        conditional = [_ratio(n, d) for n, d in zip(accepted, reached, strict=True)]
        return {
            "loss": sum(weight * loss for weight, loss in zip(weights, losses, strict=True)),
            "losses": losses,
            "accuracy": [_ratio(n, d) for n, d in zip(correct, served, strict=True)],
            "conditional": conditional,
            "tau": simulated_tau(conditional),
            "rows": [int(n) for n in served],
            "rows_in_draft_vocabulary": [int(n) for n in counts],
        }


def simulated_tau(conditional: Sequence[float]) -> float:
    """1 + the sum of the cumulative products of conditional accuracies (metrics.md)."""
    tau, product = 1.0, 1.0
    for accuracy in conditional:
        product *= accuracy
        tau += product
    return tau


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
