"""From the ledgers of a run to its entry in report.json."""

from __future__ import annotations

from eval import metrics
from eval.ledger import Ledger
from eval.report.schema import AcceptanceFigures, Lossless, Run, Settings, SpeedupFigures, TauFigures


def describe_run(
    drafter: str,
    head: str | None,
    settings: Settings,
    ledger: Ledger,
    baseline: Ledger,
    cost: metrics.Costs | None,
    lossless: Lossless,
    seed: int,
) -> Run:
    """The figures of one run. `cost` comes from a calibration made before; `baseline` decoded the same prompts."""
    speed = _speedup(ledger, baseline, cost, seed)
    gaps = metrics.latency(ledger)
    numbers, _ = metrics.per_prompt(ledger)
    return Run(
        drafter=drafter,
        head=head,
        settings=settings,
        prompts=len(numbers),
        tokens=sum(len(output.ids) for output in ledger.outputs),
        tau=_tau(ledger, seed),
        acceptance=_acceptance(ledger),
        speedup=speed,
        seconds=metrics.seconds(ledger),
        lossless=lossless,
        rounds=len(ledger.rounds),
        emitted=_histogram(ledger),
        latency=None if gaps is None else {"token": list(gaps.token), "arrival": list(gaps.arrival)},
        loops=sorted({output.prompt for output in ledger.outputs if metrics.repeats_itself(output.ids)}),
        verdict=_verdict(drafter, speed),
    )


def _tau(ledger: Ledger, seed: int) -> TauFigures:
    tau = metrics.mean_accepted_length(ledger, seed)
    _, sums = metrics.per_prompt(ledger)
    sums = sums[sums[:, metrics.ROUNDS] > 0]
    return TauFigures(
        micro=tau.micro,
        macro=tau.macro,
        ci95=_pair(tau.ci95),
        per_prompt=(sums[:, metrics.EMITTED] / sums[:, metrics.ROUNDS]).tolist(),
    )


def _acceptance(ledger: Ledger) -> AcceptanceFigures:
    found = metrics.acceptance(ledger)
    return AcceptanceFigures(conditional=found.conditional, marginal=found.marginal, rate=found.rate)


def _speedup(ledger: Ledger, baseline: Ledger, cost: metrics.Costs | None, seed: int) -> SpeedupFigures:
    found = metrics.speedup(ledger, baseline, seed)
    tau = metrics.mean_accepted_length(ledger, seed).micro
    return SpeedupFigures(
        decode=found.decode,
        end_to_end=found.end_to_end,
        ci95=_pair(found.decode_ci95),
        end_to_end_ci95=_pair(found.end_to_end_ci95),
        predicted=None if tau is None or cost is None else metrics.predicted_speedup(tau, cost),
        break_even_tau=None if cost is None else cost.total,
        slower_share=found.slower,
        per_prompt=found.per_prompt,
    )


def _histogram(ledger: Ledger) -> list[int]:
    counts = [0] * (max((row.emitted for row in ledger.rounds), default=-1) + 1)
    for row in ledger.rounds:
        counts[row.emitted] += 1
    return counts


def _verdict(drafter: str, speed: SpeedupFigures) -> str:
    """What the figures say about deploying this drafter on this machine, at this batch size."""
    if drafter == "none":
        return "baseline"
    if speed["decode"] is None:
        return "nothing decoded"
    low, high = speed["ci95"] or [speed["decode"], speed["decode"]]
    if low > 1:
        return "pays"
    even = "" if speed["break_even_tau"] is None else f"; it breaks even at tau {speed['break_even_tau']:.2f}"
    if high < 1:
        return f"do not deploy: slower than no draft{even}"
    return f"undecided: the interval includes 1x{even}"


def _pair(interval: metrics.Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
