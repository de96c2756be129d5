"""Adaptive drafting: each round's draft length, down to none, from what rounds have accepted and cost so far.

A length k is worth the tokens that a round of it emits over the seconds that it takes: the rate is
(1 + sum of the products of the first j conditional acceptances, j = 1..k) / cost(k), as in metrics.predicted_speedup.
Acceptances are discounted counts by depth, all rows of a batch pooled; costs are measured at the batch of the moment and
discounted too, since they grow with the context. What is not tried is not known, so rounds are spent on other
lengths, as long as what they are expected to lose stays a small share of all time. A length depends on earlier rounds
alone, never on the tokens it is for, so any draft stays lossless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

ACCEPTANCE_MEMORY = 128  # rounds over which a count falls to 1/e
COST_MEMORY = 64
LEAST_WEIGHT = 1e-9  # of a mean that is not added to: smaller ones would end in the rounding of their value
PRIOR_TRIALS, PRIOR_ACCEPTANCE = 1.0, 0.5
PROBE_SHARE = 0.004  # of all time may be lost by trying other lengths
PROBE_EVERY = 8  # rounds, at most so often


@dataclass
class _Mean:
    """A discounted mean of seconds."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.weight, self.total = self.weight + 1, self.total + value

    def fade(self, factor: float) -> None:
        if self.weight > LEAST_WEIGHT:
            self.weight, self.total = self.weight * factor, self.total * factor

    @property
    def value(self) -> float:
        return self.total / self.weight


class CostLine:
    """Seconds of a round by its draft length: the mean without a draft, and a line a + b k through those with one."""

    def __init__(self) -> None:
        self.means: defaultdict[int, _Mean] = defaultdict(_Mean)

    def add(self, length: int, seconds: float) -> None:
        """A round of this length took so long."""
        for mean in self.means.values():
            mean.fade(1 - 1 / COST_MEMORY)
        self.means[length].add(seconds)

    def knows(self, length: int) -> bool:
        """Was this very length tried?"""
        return length in self.means

    def at(self, length: int) -> float:
        """Expected seconds; lengths that were not tried lie on the line, by discounted least squares."""
        if length == 0:
            return self.means[0].value
        points = [(k, mean.weight, mean.value) for k, mean in self.means.items() if k]
        weight = sum(w for _, w, _ in points)
        centre = sum(w * k for k, w, _ in points) / weight
        level = sum(w * value for _, w, value in points) / weight
        spread = sum(w * (k - centre) ** 2 for k, w, _ in points)
        if spread < 1e-9:  # one length alone: on a line from the round without a draft
            slope = (level - self.means[0].value) / centre
        else:
            slope = sum(w * (k - centre) * (value - level) for k, w, value in points) / spread
        return max(level + max(0.0, slope) * (length - centre), 0.5 * self.means[0].value)


class LengthController:
    """Chooses draft lengths from 0 to `most`. One object learns over all calls that decode with one drafter."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"most {most}: a drafter that drafts nothing has no length to choose")
        self.most = most
        self._tried = [PRIOR_TRIALS] * most
        self._taken = [PRIOR_TRIALS * PRIOR_ACCEPTANCE] * most
        self._costs: defaultdict[int, CostLine] = defaultdict(CostLine)  # by rows of the batch
        self._first = [0, most, 0, max(1, most // 2)]  # the first rounds' lengths
        self._spent = self._seconds = 0.0
        self._rounds = self._last_probe = 0

    def choose(self, rows: int) -> int:
        """The next round's draft length for a batch of `rows` rows."""
        costs = self._costs[rows]
        for length in self._first:
            if not costs.knows(length):
                return length
        tokens = self._expected_tokens()
        rates = [tokens[k] / costs.at(k) for k in range(self.most + 1)]
        best = max(range(self.most + 1), key=rates.__getitem__)
        return self._probe(costs, tokens, rates, best)

    def _probe(self, costs: CostLine, tokens: Sequence[float], rates: Sequence[float], best: int) -> int:
        """`best`, or now and then the most promising length beside it."""
        if self._rounds - self._last_probe < PROBE_EVERY:
            return best
        others = {0, 1, best - 1, best + 1, 2 * best, self.most} - {best}
        # the one that was looked at least, measured by what a look at it may lose
        candidates = [k for k in others if 0 <= k <= self.most]
        lost = {k: max(0.0, costs.at(k) - tokens[k] / rates[best]) for k in candidates}
        known = {k: costs.means[k].weight if costs.knows(k) else 0.0 for k in candidates}
        length = min(candidates, key=lambda k: (lost[k] * (1 + known[k]) + 1e-6 * known[k], k))
        if self._spent + lost[length] > PROBE_SHARE * self._seconds:
            return best
        self._last_probe = self._rounds
        self._spent += lost[length]
        return length

    def observe(self, rows: int, length: int, accepted: Sequence[int], seconds: float) -> None:
        """A round of `rows` rows asked for `length` drafts; `accepted` are its live rows' accepted drafts."""
        self._costs[rows].add(length, seconds)
        self._rounds, self._seconds = self._rounds + 1, self._seconds + seconds
        fade = 1 - 1 / ACCEPTANCE_MEMORY
        for depth in range(length):  # a depth that was not reached has learnt nothing, and keeps what it knows
            reached = sum(count >= depth for count in accepted)
            if not reached:
                break
            taken = sum(count > depth for count in accepted)
            self._tried[depth] = self._tried[depth] * fade + reached
            self._taken[depth] = self._taken[depth] * fade + taken

    def _expected_tokens(self) -> list[float]:
        """Tokens that a round emits by draft length. A depth nobody has reached is as good as the one before it."""
        tokens, chance, acceptance = [1.0], 1.0, PRIOR_ACCEPTANCE
        for tried, taken in zip(self._tried, self._taken, strict=True):
            if tried > PRIOR_TRIALS:
                acceptance = taken / tried
            chance *= acceptance
            tokens.append(tokens[-1] + chance)
        return tokens
