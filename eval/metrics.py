"""Every figure of a report, computed from ledgers and from nothing else.

Definitions are those of speculative decoding's papers; where tools differ, this module says which one it follows.
Intervals are 95 % percentile bootstraps over prompts, since rounds of one prompt are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.ledger import Ledger

Floats = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 4000
EMITTED, ROUNDS, DECODE_S, TOKENS, PREFILL_S = range(5)  # columns of `per_prompt`


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance by depth (index 0 is depth 1) and in all.

    `conditional[k-1]`: share of drafts of depth k accepted among those offered whose first k-1 were accepted; None
    where there was none. `marginal[k-1]`: rounds that accepted depth k over rounds that drafted (vLLM's per-position
    rate). `rate`: accepted over drafted tokens; None when nothing was drafted.
    """

    conditional: list[float | None]
    marginal: list[float]
    rate: float | None


@dataclass(frozen=True, slots=True)
class Tau:
    """Mean accepted length: emitted decode tokens over verification passes, the target's own token included.

    `micro` pools all rounds, `macro` is the mean over prompts of each prompt's own, `ci95` is about `micro`. The
    prefill token is in neither count. None where there are no rounds; no interval from fewer than two prompts.
    """

    micro: float | None
    macro: float | None
    ci95: Interval | None


@dataclass(frozen=True, slots=True)
class Speedup:
    """Tokens per second over the baseline's on the same prompts, pooled over prompts.

    `decode` counts from the first token on (the prefill apart), `end_to_end` the prefill too. `per_prompt` is the
    decode speedup of each prompt in the order of their numbers, `slower` the share of prompts below 1x.
    """

    decode: float | None
    end_to_end: float | None
    decode_ci95: Interval | None
    end_to_end_ci95: Interval | None
    per_prompt: list[float]
    slower: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds at the 50th, 90th and 99th percentile.

    `token`: a round's seconds over its emitted tokens, one value a token. `arrival`: a round's seconds, one value a
    round: what a reader waits between two bursts of a stream.
    """

    token: tuple[float, float, float]
    arrival: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Costs:
    """What one round costs, in target steps: one step is a whole round of the baseline at the same batch."""

    draft: float
    verify: float
    host: float

    @property
    def total(self) -> float:
        """The tau at which speculation breaks even."""
        return self.draft + self.verify + self.host


def per_prompt(ledger: Ledger) -> tuple[list[int], Floats]:
    """Prompt numbers, ascending, and [prompts, 5] sums: emitted, rounds, decode s, output tokens, prefill s."""
    numbers = sorted({row.prompt for row in ledger.rounds} | {output.prompt for output in ledger.outputs})
    place = {number: index for index, number in enumerate(numbers)}
    sums = np.zeros((len(numbers), 5))
    for row in ledger.rounds:
        sums[place[row.prompt], :3] += (row.emitted, 1, row.seconds)
    for output in ledger.outputs:
        sums[place[output.prompt], 3:] += (len(output.ids), output.prefill_s)
    return numbers, sums


def acceptance(ledger: Ledger) -> Acceptance:
    """Acceptance by depth, from the counts before the cut; at a tree's depth any of its nodes there may be the one."""
    drafts = [row for row in ledger.rounds if row.drafted]
    conditional: list[float | None] = []
    marginal: list[float] = []
    for depth in range(1, max((row.offered for row in drafts), default=0) + 1):
        reached = sum(row.accepted >= depth for row in drafts)
        offered = sum(row.offered >= depth and row.accepted >= depth - 1 for row in drafts)
        conditional.append(reached / offered if offered else None)
        marginal.append(reached / len(drafts))
    drafted = sum(row.drafted for row in drafts)
    return Acceptance(conditional, marginal, sum(row.accepted for row in drafts) / drafted if drafted else None)


def mean_accepted_length(ledger: Ledger, seed: int = 0) -> Tau:
    """Tau with its interval; prompts that ended at the prefill token have no rounds and no part in it."""
    _, sums = per_prompt(ledger)
    sums = sums[sums[:, ROUNDS] > 0]
    if not len(sums):
        return Tau(None, None, None)

    def micro(total: Floats) -> Floats:
        return total[..., EMITTED] / total[..., ROUNDS]

    macro = float(np.mean(sums[:, EMITTED] / sums[:, ROUNDS]))
    return Tau(float(micro(sums.sum(0))), macro, bootstrap(sums, micro, seed))


def speedup(run: Ledger, baseline: Ledger, seed: int = 0) -> Speedup:
    """Speed of a run over the baseline's, prompts paired. Rates, not seconds, so lengths may differ.

    Raises ValueError when the two did not decode the same prompts.
    """
    numbers, ours = per_prompt(run)
    others, theirs = per_prompt(baseline)
    if numbers != others:
        raise ValueError(f"a run over prompts {numbers} cannot be set against a baseline over prompts {others}")
    both = np.concatenate([ours, theirs], axis=1)
    width = ours.shape[1]

    def decode(total: Floats) -> Floats:
        mine = total[..., EMITTED] / total[..., DECODE_S]
        return mine / (total[..., width + EMITTED] / total[..., width + DECODE_S])

    def end_to_end(total: Floats) -> Floats:
        mine = total[..., TOKENS] / (total[..., PREFILL_S] + total[..., DECODE_S])
        base = total[..., width + TOKENS] / (total[..., width + PREFILL_S] + total[..., width + DECODE_S])
        return mine / base

    decoded = both[(both[:, ROUNDS] > 0) & (both[:, width + ROUNDS] > 0)]
    if not len(decoded):
        return Speedup(None, None, None, None, [], None)
    single = decode(decoded)
    return Speedup(
        decode=float(decode(decoded.sum(0))),
        end_to_end=float(end_to_end(both.sum(0))),
        decode_ci95=bootstrap(decoded, decode, seed),
        end_to_end_ci95=bootstrap(both, end_to_end, seed),
        per_prompt=single.tolist(),
        slower=float(np.mean(single < 1)),
    )


def bootstrap(sums: Floats, statistic: Callable[[Floats], Floats], seed: int = 0) -> Interval | None:
    """95 % percentile interval of a statistic of column sums, prompts (rows) drawn with replacement.

    `sums` [prompts, columns]; `statistic` maps [resamples, columns] totals to [resamples]. None below two prompts.
    """
    count = len(sums)
    if count < 2:
        return None
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    low, high = np.percentile(statistic(draws @ sums), [2.5, 97.5])
    return float(low), float(high)


def latency(ledger: Ledger) -> Latency | None:
    """Inter-token and between-arrival percentiles; None without rounds. Needs the pass's time, so shares times rows."""
    if not ledger.rounds:
        return None
    emitted = np.array([row.emitted for row in ledger.rounds])
    seconds = np.array([row.seconds * row.rows for row in ledger.rounds])
    token = np.percentile(np.repeat(seconds / emitted, emitted), [50, 90, 99])
    arrival = np.percentile(seconds, [50, 90, 99])
    return Latency((token[0], token[1], token[2]), (arrival[0], arrival[1], arrival[2]))


def seconds(ledger: Ledger) -> dict[str, float]:
    """Wall time by what it went to: draft, verify, host, and the prefill apart."""
    return {
        "draft": sum(row.draft_s for row in ledger.rounds),
        "verify": sum(row.verify_s for row in ledger.rounds),
        "host": sum(row.host_s for row in ledger.rounds),
        "prefill": sum(output.prefill_s for output in ledger.outputs),
    }


def costs(calibration: Ledger, baseline: Ledger) -> Costs | None:
    """Mean cost of a round in target steps, from ledgers of a calibration made apart and before the measured run."""
    if not calibration.rounds or not baseline.rounds:
        return None
    step = sum(row.seconds for row in baseline.rounds) / len(baseline.rounds)
    spent, count = seconds(calibration), len(calibration.rounds)
    return Costs(*(spent[part] / count / step for part in ("draft", "verify", "host")))


def predicted_speedup(tau: float, cost: Costs) -> float:
    """Decode speedup to expect of a mean accepted length at a round's cost in target steps."""
    return tau / cost.total


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a round emits when each of `gamma` chained drafts is accepted with chance `alpha`, the bonus included."""
    return float(sum(alpha**depth for depth in range(gamma + 1)))


def predicted_autoregressive(alpha: float, gamma: int, c: float, r: float = 1.0) -> float:
    """Speedup of an autoregressive draft: `c` a draft step, `r` a verification pass, both in one-token target passes.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", theorem 3.8, with r beside it.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + r)


def predicted_one_pass(alpha: float, gamma: int, d: float, r: float = 1.0) -> float:
    """Speedup of a draft made in one pass of cost `d` (Medusa, block drafters)."""
    return expected_tokens(alpha, gamma) / (d + r)


def repeats_itself(ids: Sequence[int], longest: int = 16, tokens: int = 16) -> bool:
    """Whether the text fell into a loop: a block of up to `longest` tokens, four times or more in a row.

    At least `tokens` tokens must repeat the block before them, so that a row of dots or a table rule is no loop.
    Loops are drafted best and mean nothing; a report flags them.
    """
    for period in range(1, longest + 1):
        run = 0
        for index in range(period, len(ids)):
            run = run + 1 if ids[index] == ids[index - period] else 0
            if run >= max(3 * period, tokens):
                return True
    return False
