"""A chain that is drawn token by token from a draft's logits, under the very settings that the target decodes with.

Shapes: B rows, V vocabulary of the target.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eval.chooser import Chooser
from eval.law import Dense
from eval.sampling import Context, Sampling, target_law
from eval.tree import DraftTree


def draft_context(sampling: Sampling, sequences: list[list[int]], start_B: Tensor) -> Context | None:
    """The texts that penalties look at, prompts ending at `start_B`; None where the law needs none."""
    if not sampling.needs_context:
        return None
    return replace(Context.of(sequences, [0] * len(sequences), start_B.device), start_R=start_B)


class ChainDraws:
    """One round's chain in the making: each `draw` adds a token, and the law it was drawn from where there is one."""

    def __init__(self, sampling: Sampling, chooser: Chooser, context: Context | None, counts_B: Tensor) -> None:
        """`counts_B`: drafts that each row gets; later draws of a row are padding."""
        self._sampling, self._chooser, self._context, self._counts_B = sampling, chooser, context, counts_B
        self._tokens: list[Tensor] = []
        self._laws: list[Tensor] = []

    def draw(self, logits_BV: Tensor) -> Tensor:
        """The next token [B]: the first choice at temperature 0, else a draw from the law that the tree will state."""
        depth, context = len(self._tokens), self._context
        if context is not None and depth:
            context = context.extended(torch.stack(self._tokens, 1), torch.full_like(context.length_R, depth))
        law, _ = target_law(logits_BV, self._sampling, context)
        self._tokens.append(self._chooser.draft(law, depth, 0, self._counts_B > depth))
        if isinstance(law, Dense):
            self._laws.append(law.probs_RV)
        return self._tokens[-1]

    def tree(self, root_B: Tensor, ragged: bool) -> DraftTree:
        """The chain of all draws; `ragged` says whether some rows get fewer (a host fact, so that nothing waits)."""
        laws_BKV = torch.stack(self._laws, 1) if self._laws else None
        return DraftTree.chain(root_B, torch.stack(self._tokens, 1), self._counts_B if ragged else None, laws_BKV)
