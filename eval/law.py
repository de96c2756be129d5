"""Probability laws over the vocabulary, and the few operations that verification makes on them.

Shape suffixes: R rows of any kind, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PointMass:
    """All probability on one token: greedy targets and every draft chosen without sampling. Holds ids, never [.., V]."""

    ids_R: Tensor

    def probability(self, ids_R: Tensor) -> Tensor:
        """Probability of one token a row: 1.0 where it is the row's token, else 0.0."""
        return (self.ids_R == ids_R).to(torch.float32)


@dataclass(frozen=True)
class Dense:
    """Probabilities over the vocabulary; the last axis sums to 1."""

    probs_RV: Tensor

    def probability(self, ids_R: Tensor) -> Tensor:
        """Probability of one token a row; 0 for the id -1 (no token)."""
        picked_R = self.probs_RV.gather(-1, ids_R.clamp(min=0)[..., None])[..., 0]
        return picked_R.where(ids_R >= 0, 0.0)


Law = PointMass | Dense


def dense(law: Law, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The law as probabilities [R, V]; a point mass becomes a one-hot row."""
    if isinstance(law, Dense):
        return law.probs_RV
    one_hot_RV = torch.zeros((*law.ids_R.shape, vocab_size), dtype=dtype, device=law.ids_R.device)
    return one_hot_RV.scatter_(-1, law.ids_R[..., None], 1.0)


def normalised(mass_RV: Tensor, instead_RV: Tensor) -> Tensor:
    """`mass_RV` scaled to sum 1 a row; rows without any mass become `instead_RV`.

    A row of zero mass is reached with probability zero in exact arithmetic; rounding can still lead there.
    """
    total_R1 = mass_RV.sum(-1, keepdim=True)
    return torch.where(total_R1 > 0, mass_RV / total_R1, instead_RV)


def residual(target_RV: Tensor, draft_RV: Tensor) -> Tensor:
    """norm(max(p - q, 0)): what the target still owes after a draft from `draft_RV` was rejected.

    Leviathan et al. 2023, section 2.3. Where p <= q everywhere, a rejection has probability zero and p itself stands in.
    """
    return normalised((target_RV - draft_RV).clamp(min=0), target_RV)


def without_token(law_RV: Tensor, ids_R: Tensor) -> Tensor:
    """The law with one token a row removed, renormalised: what the next sibling drawn without replacement comes from.

    A row that had no other token keeps zero mass: nothing is left to draw.
    """
    rest_RV = law_RV.scatter(-1, ids_R.clamp(min=0)[..., None], 0.0)
    return normalised(rest_RV, torch.zeros_like(rest_RV)).where((ids_R >= 0)[..., None], law_RV)
