"""Every random act of drafting and verification goes through a chooser.

Production hands in `SeededChooser`, whose coins are a pure function of (seed, position in the output, purpose). So a
row's text does not depend on its neighbours in the batch, on the device, or on how the rounds fell; and where drafts
are chosen without sampling it is the very text that the same seed gives with no draft at all. The proof
(eval/enumeration.py) hands in a chooser that takes every branch and carries its exact probability.

Shape suffixes: B rows, V vocabulary, P positions in a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eval.law import Law, PointMass
from heads.errors import HeadwayError

# Purposes of a coin. Trials of one depth are told apart by adding the trial's number.
PICK, ACCEPT, DRAFT = 1 << 20, 2 << 20, 3 << 20
# Tokens whose probabilities are summed together in a first step when a token is drawn.
BLOCK = 512
# Coins are made for this many depths at once: one small kernel run a round and purpose, not one a depth.
SPAN = 64

_GAMMA, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Chooser(Protocol):
    """What verification and sampling drafters may ask for. `depth` counts from the root of the round's draft tree.

    `live_B` marks the rows whose answer is read; the other rows' answers must not matter.
    """

    def pick(self, law: Law, depth: int | Tensor, live_B: Tensor) -> Tensor:
        """The target's own token after `depth` accepted drafts: ids [B] drawn from the law."""
        ...

    def accept(self, probability_B: Tensor, depth: int, trial: int, live_B: Tensor) -> Tensor:
        """Bool [B], True with the given probability: is the `trial`-th child of the node at `depth` accepted?"""
        ...

    def draft(self, law: Law, depth: int, trial: int, live_B: Tensor) -> Tensor:
        """A draft token drawn from the law: ids [B]. One (depth, trial) may be used once a round."""
        ...


def accepted(coin_B: Tensor, probability_B: Tensor) -> Tensor:
    """coin < probability, with coins in [0, 1): probability 0 is never accepted and probability 1 always."""
    return coin_B < probability_B


def invert(probs_BV: Tensor, coin_B: Tensor) -> Tensor:
    """Inverse distribution function: ids [B] with law `probs_BV`, from coins in [0, 1).

    The first token whose running sum exceeds coin * total: never one of probability zero. Sums run over blocks first
    and then inside one, in float64, so that no second [B, V] is made; a block's own sum has the rounding of the law
    itself. Rounding at a top end falls back on the last token with mass, so an id is in range for any input, NaN too.
    """
    vocab = probs_BV.shape[-1]
    size = min(BLOCK, vocab)
    whole = vocab - vocab % size
    sums_BK = probs_BV[:, :whole].unflatten(1, (-1, size)).sum(-1)
    rest_B1 = probs_BV[:, whole:].sum(-1, keepdim=True)
    running_BK = torch.cat([sums_BK, rest_B1], 1).to(torch.float64).cumsum(1)
    level_B1 = coin_B[:, None] * running_BK[:, -1:]
    block_B1 = _first_above(running_BK, level_B1)
    before_B1 = running_BK.gather(1, (block_B1 - 1).clamp(min=0)).masked_fill(block_B1 == 0, 0.0)
    index_BX = block_B1 * size + torch.arange(size, device=probs_BV.device)
    inside_BX = probs_BV.gather(1, index_BX.clamp(max=vocab - 1)).to(torch.float64).masked_fill(index_BX >= vocab, 0.0)
    offset_B1 = _first_above(inside_BX.cumsum(1), level_B1 - before_B1)
    return (block_B1 * size + offset_B1)[:, 0].clamp(max=vocab - 1)


def _first_above(running_BX: Tensor, level_B1: Tensor) -> Tensor:
    """Index [B, 1] of the first running sum above the level, and at most that of the last one that still grew."""
    found_B1 = torch.searchsorted(running_BX, level_B1, right=True)
    return torch.minimum(found_B1, torch.searchsorted(running_BX, running_BX[:, -1:].contiguous(), right=False))


def _mix(state: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors (arithmetic wraps; shifts are made logical by a mask)."""
    state = state + _signed(_GAMMA)
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _signed(_MIX_A)
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _signed(_MIX_B)
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def coins(seed_B: Tensor, position_BP: Tensor, purpose: int) -> Tensor:
    """Uniforms in [0, 1), float64 [B, P], 53 bits each: a function of the three arguments alone."""
    state_BP = _mix(_mix(_mix(seed_B)[:, None] ^ position_BP) ^ purpose)
    return ((state_BP >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


class SeededChooser:
    """Coins from seeds: one seed a row.

    Call `begin` with each row's output length before every round. Coins for the target's own tokens are keyed by the
    absolute output position; acceptance and draft coins by the round's first position too, so that none is used twice.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not seeds:
            raise HeadwayError("a chooser needs one seed for each row of the batch, got none")
        self.seed_B = torch.tensor([_signed(seed % (1 << 64)) for seed in seeds], dtype=torch.int64, device=device)
        self.begin(torch.zeros_like(self.seed_B))

    def begin(self, position_B: Tensor) -> None:
        """Start a round: `position_B` [B] = tokens of each row's output so far (0 for the prefill's own token)."""
        self._position_BP = position_B[:, None] + torch.arange(SPAN + 1, device=position_B.device)
        self._round_B = _mix(self.seed_B ^ _mix(position_B))
        self._tables: dict[int, Tensor] = {}

    def _coin(self, purpose: int, depth: int | Tensor) -> Tensor:
        if isinstance(depth, int) and depth >= SPAN:
            raise HeadwayError(f"a draft of more than {SPAN - 1} tokens in a row cannot be verified; shorten the draft")
        if purpose not in self._tables:
            seed_B = self.seed_B if purpose == PICK else self._round_B
            self._tables[purpose] = coins(seed_B, self._position_BP, purpose)
        table_BP = self._tables[purpose]
        if isinstance(depth, int):
            return table_BP[:, depth]
        return table_BP.gather(1, depth[:, None])[:, 0]

    def pick(self, law: Law, depth: int | Tensor, live_B: Tensor) -> Tensor:
        """See Chooser."""
        if isinstance(law, PointMass):
            return law.ids_R
        return invert(law.probs_RV, self._coin(PICK, depth))

    def accept(self, probability_B: Tensor, depth: int, trial: int, live_B: Tensor) -> Tensor:
        """See Chooser."""
        return accepted(self._coin(ACCEPT + trial, depth), probability_B)

    def draft(self, law: Law, depth: int, trial: int, live_B: Tensor) -> Tensor:
        """See Chooser."""
        if isinstance(law, PointMass):
            return law.ids_R
        return invert(law.probs_RV, self._coin(DRAFT + trial, depth))
