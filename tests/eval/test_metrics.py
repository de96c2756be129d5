"""Figures against hand counts, closed forms and scipy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from eval import metrics
from eval.ledger import Ledger, Output, Round
from heads.errors import HeadwayError


def row(prompt: int, drafted: int, accepted: int, emitted: int, total: float = 1.0, rows: int = 1) -> Round:
    """A round whose seconds are split 1 : 2 : 1 over draft, verify and host."""
    return Round(prompt, 1, drafted, accepted, emitted, None, total / 4, total / 2, total / 4, rows)


def hand_ledger() -> Ledger:
    """Two prompts; the third round was cut at EOS: 5 verified, 3 emitted."""
    rounds = [row(0, 4, 2, 3), row(0, 4, 0, 1), row(0, 5, 5, 3), row(1, 0, 0, 1, 2.0), row(1, 2, 1, 2, 2.0)]
    return Ledger(rounds, [Output(0, list(range(8)), 0.5, "eos"), Output(1, list(range(4)), 0.5, "length")])


def test_acceptance_by_depth_is_counted_before_the_cut() -> None:
    found = metrics.acceptance(hand_ledger())
    # Drafting rounds (drafted, accepted): (4, 2), (4, 0), (5, 5), (2, 1).
    assert found.marginal == [3 / 4, 2 / 4, 1 / 4, 1 / 4, 1 / 4]
    assert found.conditional == [3 / 4, 2 / 3, 1 / 2, 1.0, 1.0]
    assert found.rate == 8 / 15


def test_acceptance_of_trees_goes_by_their_depth() -> None:
    """Ten nodes three levels deep: no depth beyond 3 was offered, whatever the number of nodes."""
    rounds = [replace(row(0, 10, accepted, accepted + 1), depth=3) for accepted in (3, 1, 0, 3)]
    found = metrics.acceptance(Ledger(rounds, []))
    assert found.conditional == [3 / 4, 2 / 3, 1.0]
    assert found.marginal == [3 / 4, 2 / 4, 2 / 4]


def test_no_draft_has_no_acceptance_and_a_tau_of_one() -> None:
    ledger = Ledger([row(0, 0, 0, 1), row(0, 0, 0, 1)], [Output(0, [1, 2, 3], 0.1, None)])
    assert metrics.acceptance(ledger) == metrics.Acceptance([], [], None)
    assert metrics.mean_accepted_length(ledger) == metrics.Tau(1.0, 1.0, None)


def test_tau_pools_rounds_and_leaves_the_prefill_token_out() -> None:
    tau = metrics.mean_accepted_length(hand_ledger())
    assert tau.micro == 10 / 5
    assert tau.macro == pytest.approx((7 / 3 + 3 / 2) / 2)


def test_eos_inside_the_accepted_prefix_emits_three_of_five_verified() -> None:
    """[a, b, EOS, d, e, bonus] is 3 emitted and 5 verified, never 6 tokens."""
    ledger = Ledger([row(0, 5, 5, 3)], [Output(0, [9, 1, 2, 0], 0.1, "eos")])
    ledger.check()
    assert metrics.mean_accepted_length(ledger).micro == 3.0
    assert metrics.acceptance(ledger).rate == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        Ledger([row(0, 2, 1, 2)], [Output(0, [1, 2], 0.1, None)]),  # one token too many emitted
        Ledger([row(0, 2, 1, 2)], [Output(0, [1, 2, 3, 4], 0.1, None)]),  # one token no round emitted
        Ledger([row(0, 2, 3, 2)], [Output(0, [1, 2, 3], 0.1, None)]),  # more accepted than drafted
        Ledger([row(0, 2, 0, 2)], [Output(0, [1, 2, 3], 0.1, None)]),  # more emitted than accepted and bonus
    ],
)
def test_a_ledger_that_does_not_add_up_is_refused(bad: Ledger) -> None:
    with pytest.raises(ValueError, match="ledger"):
        bad.check()


def random_ledger(prompts: int, seed: int, pace: float) -> Ledger:
    """Chains of 4 with acceptance that differs from prompt to prompt; a round takes `pace` seconds or a bit more."""
    source = np.random.default_rng(seed)
    ledger = Ledger()
    for prompt in range(prompts):
        alpha = source.uniform(0.2, 0.9)
        total = 1
        for _ in range(source.integers(5, 15)):
            accepted = int((source.random(4) < alpha).cumprod().sum())
            ledger.rounds.append(row(prompt, 4, accepted, accepted + 1, pace * source.uniform(1, 1.2)))
            total += accepted + 1
        ledger.outputs.append(Output(prompt, [0] * total, pace * 3, None))
    ledger.check()
    return ledger


def totals(ledger: Ledger, prompt: int) -> tuple[float, float, float]:
    """Emitted tokens, rounds, decode seconds of one prompt, by plain sums."""
    rounds = [r for r in ledger.rounds if r.prompt == prompt]
    return sum(r.emitted for r in rounds), len(rounds), sum(r.draft_s + r.verify_s + r.host_s for r in rounds)


def test_tau_interval_agrees_with_scipy() -> None:
    ledger = random_ledger(12, seed=1, pace=0.1)
    emitted, rounds = np.array([totals(ledger, p)[:2] for p in range(12)]).T
    expected = stats.bootstrap(
        (emitted, rounds),
        lambda e, r, axis: e.sum(axis) / r.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    tau = metrics.mean_accepted_length(ledger)
    assert tau.micro == pytest.approx(emitted.sum() / rounds.sum())
    assert tau.ci95 == pytest.approx((expected.low, expected.high), abs=0.03)
    assert metrics.mean_accepted_length(ledger).ci95 == tau.ci95, "the same seed gives the same interval"


def test_speedup_is_the_ratio_of_pooled_rates_and_its_interval_is_over_prompts() -> None:
    run, baseline = random_ledger(10, seed=3, pace=0.15), random_ledger(10, seed=4, pace=0.2)
    mine, base = (np.array([totals(ledger, p) for p in range(10)]).T for ledger in (run, baseline))
    found = metrics.speedup(run, baseline)
    assert found.decode == pytest.approx((mine[0].sum() / mine[2].sum()) / (base[0].sum() / base[2].sum()))
    whole = [(pooled[0].sum() + 10) / (pooled[2].sum() + 10 * 3 * pace) for pooled, pace in ((mine, 0.15), (base, 0.2))]
    assert found.end_to_end == pytest.approx(whole[0] / whole[1])
    single = (mine[0] / mine[2]) / (base[0] / base[2])
    assert found.per_prompt == pytest.approx(single.tolist())
    assert found.slower == np.mean(single < 1)
    expected = stats.bootstrap(
        (mine[0], mine[2], base[0], base[2]),
        lambda a, b, c, d, axis: (a.sum(axis) / b.sum(axis)) / (c.sum(axis) / d.sum(axis)),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(5),
    ).confidence_interval
    assert found.decode_ci95 == pytest.approx((expected.low, expected.high), abs=0.03)


def test_speedup_refuses_other_prompts() -> None:
    with pytest.raises(ValueError, match="prompts"):
        metrics.speedup(random_ledger(3, 0, 1.0), random_ledger(4, 0, 1.0))


def test_repeats_pool_and_a_run_against_itself_is_one() -> None:
    once, again = random_ledger(4, seed=6, pace=0.1), random_ledger(4, seed=7, pace=0.1)
    pooled = Ledger()
    for part in (once, again):
        pooled.absorb(part, range(4))
    pooled.check()
    same = metrics.speedup(pooled, pooled)
    assert (same.decode, same.end_to_end, same.slower) == (1.0, 1.0, 0.0)


def test_latency_percentiles() -> None:
    ledger = Ledger([row(0, 3, 3, 4, 2.0), row(0, 3, 0, 1, 1.0), row(0, 3, 0, 1, 0.75, rows=4)], [])
    found = metrics.latency(ledger)
    assert found is not None
    assert found.token == pytest.approx(tuple(np.percentile([0.5] * 4 + [1.0, 3.0], [50, 90, 99])))
    assert found.arrival == pytest.approx(tuple(np.percentile([2.0, 1.0, 3.0], [50, 90, 99])))


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "r", "speedup"),
    [
        (0.8, 4, 0.05, 1.0, 2.80),
        (0.8, 8, 0.05, 1.0, 3.09),
        (0.6, 4, 0.05, 1.0, 1.92),
        (0.9, 4, 0.05, 1.0, 3.41),
        (0.8, 4, 0.05, 1.0 + 4 * 0.3, 1.40),  # each extra draft token adds 30 % of a step
        (0.6, 4, 0.05, 1.0 + 4 * 0.3, 0.96),
        (0.9, 8, 0.05, 1.0, 4.38),
        (1.0, 5, 1 / 30, 1.0, 5.14),
    ],
)
def test_predicted_speedup_of_an_autoregressive_draft(
    alpha: float, gamma: int, c: float, r: float, speedup: float
) -> None:
    assert metrics.predicted_autoregressive(alpha, gamma, c, r) == pytest.approx(speedup, abs=0.005)
    assert metrics.predicted_one_pass(alpha, gamma, gamma * c, r) == pytest.approx(speedup, abs=0.005)


def test_expected_tokens_equals_its_closed_form() -> None:
    assert metrics.expected_tokens(0.8, 4) == pytest.approx(3.36, abs=0.005)
    assert metrics.expected_tokens(0.7, 6) == pytest.approx((1 - 0.7**7) / (1 - 0.7))
    assert metrics.expected_tokens(1.0, 5) == 6.0


def test_costs_are_in_baseline_rounds_and_predict_its_own_measurement() -> None:
    """A calibration that is the run itself must predict the run exactly: the formula has no slack of its own."""
    run, baseline = random_ledger(5, seed=8, pace=0.3), random_ledger(5, seed=9, pace=0.2)
    baseline.rounds = [row(r.prompt, 0, 0, 1, r.seconds) for r in baseline.rounds]
    cost = metrics.costs(run, baseline)
    tau = metrics.mean_accepted_length(run).micro
    assert cost is not None
    assert tau is not None
    mine, base = (sum(r.seconds for r in part.rounds) / len(part.rounds) for part in (run, baseline))
    assert (cost.draft, cost.verify, cost.host) == pytest.approx((mine / base / 4, mine / base / 2, mine / base / 4))
    assert metrics.predicted_speedup(tau, cost) == pytest.approx(metrics.speedup(run, baseline).decode)


def test_a_loop_is_flagged_and_ordinary_repetition_is_not() -> None:
    assert metrics.repeats_itself([1, 2, 3, *[7, 8, 9, 10] * 6])
    assert metrics.repeats_itself([5] * 20)
    assert not metrics.repeats_itself([5] * 10)
    assert not metrics.repeats_itself([7, 8, 9, 10] * 3)
    assert not metrics.repeats_itself(np.random.default_rng(0).integers(0, 50, 300).tolist())


def test_ledger_file_round_trips_and_names_a_bad_line(tmp_path: Path) -> None:
    ledger = hand_ledger()
    ledger.write_jsonl(tmp_path / "ledger.jsonl")
    assert Ledger.read_jsonl(tmp_path / "ledger.jsonl") == ledger
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"kind": "round", "prompt": 1}\n')
    with pytest.raises(HeadwayError, match=r"ledger\.jsonl, line 8"):
        Ledger.read_jsonl(tmp_path / "ledger.jsonl")
