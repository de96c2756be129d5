"""The production chooser on every coin of a grid, the ends included: that a coin of 0 or just below 1 does no harm.

Forked outcomes say nothing about how a coin becomes an outcome. Here `SeededChooser` itself is enumerated: its coins
come from a grid with 0 and 1 - 2^-53 in it, on laws whose probabilities are multiples of the grid's step, for which
the law of the emitted tokens is then exact.

Shape suffixes: R rows, S prefixes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eval.chooser import ACCEPT, DRAFT, PICK, SeededChooser
from eval.enumeration import Cases, Experiment, joint_deviations, one_round
from eval.tree import TreeShape

STEPS = 8
# One coin in each of the grid's equal intervals: at the very left end, inside, and at the very right end.
GRID = (0.0, *((2 * step + 1) / (2 * STEPS) for step in range(1, STEPS - 1)), 1.0 - 2.0**-53)
EXPERIMENT = Experiment("rejection, production coins at both ends", "rejection", "iid", TreeShape.of([(0,)]), vocab=4)


class GridChooser(SeededChooser):
    """SeededChooser with given coins: one for drafting, one for accepting and one for the last draw a row."""

    def __init__(self, draft_R: Tensor, accept_R: Tensor, pick_R: Tensor) -> None:
        super().__init__([0] * draft_R.shape[0])
        self._given = {DRAFT: draft_R, ACCEPT: accept_R, PICK: pick_R}

    def _coin(self, purpose: int, depth: int | Tensor) -> Tensor:
        return self._given[purpose]


def grid_cases(count: int, seed: int) -> Cases:
    """Laws in steps of 1/8, half of the drafts disjoint from the target and half equal to it."""
    generator = torch.Generator().manual_seed(seed)
    # Eight steps shared out among two of the four tokens; the other two have none.
    first_RS = torch.randint(0, STEPS + 1, (count, 5), generator=generator).double() / STEPS
    low_RSV = torch.stack([torch.zeros_like(first_RS), first_RS, torch.zeros_like(first_RS), 1 - first_RS], -1)
    high_RSV = low_RSV.flip(-1)
    logits_RSV = torch.where((torch.arange(count) % 4 < 2)[:, None, None], low_RSV, high_RSV).log()
    # By way of the logits, so that an equal draft has the very bits of the target's law and a ratio of exactly 1.
    target_RSV = logits_RSV.softmax(-1)
    draft_RSV = torch.where((torch.arange(count) % 2 == 0)[:, None, None], target_RSV, target_RSV.flip(-1))
    return Cases(logits_RSV, target_RSV, draft_RSV)


def grid_deviations(cases: Cases) -> Tensor:
    """Total variation from the target's law [R], over every combination of three coins."""
    grid_G = torch.tensor(GRID, dtype=torch.float64)
    coins_G3 = torch.cartesian_prod(grid_G, grid_G, grid_G)
    case_R = torch.arange(len(cases)).repeat_interleave(len(coins_G3))
    chooser = GridChooser(*coins_G3.repeat(len(cases), 1).unbind(1))
    verified = one_round(EXPERIMENT, cases, case_R, chooser)
    weight_R = torch.full((len(case_R),), 1 / len(coins_G3), dtype=torch.float64)
    return joint_deviations(EXPERIMENT, cases, [(case_R, verified, weight_R)])
