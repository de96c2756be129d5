"""The empty drafter: every round verifies the root alone. The baseline of every measurement."""

from __future__ import annotations

import torch

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.sampling import Sampling
from eval.tree import DraftTree


class NoDrafter:
    """One token a pass, plain autoregressive decoding."""

    name = "none"
    most_drafts = depth = 0
    taps: tuple[int, ...] = ()

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Nothing to forget."""

    def observe(self, committed: Committed) -> None:
        """Nothing to learn."""

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        """The root alone."""
        return DraftTree.root_only(root_B)
