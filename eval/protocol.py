"""How a measurement is run: warmed up, calibrated apart and before, drafters and baseline interleaved per prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from eval.contenders import BASELINE, Contender
from eval.decode import Settings, decode
from eval.ledger import Ledger
from eval.metrics import Costs, costs
from eval.progress import Steps
from heads.target import Target

WARM_TOKENS = 4
CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 2, 32


@dataclass(frozen=True)
class Plan:
    """What to decode: token ids to measure on, others to calibrate on, the settings, how often."""

    prompts: Sequence[list[int]]
    calibration: Sequence[list[int]]
    settings: Settings
    repeats: int

    @property
    def calibration_settings(self) -> Settings:
        """Those of the measurement, over at most CALIBRATION_TOKENS tokens."""
        return replace(self.settings, max_new_tokens=min(CALIBRATION_TOKENS, self.settings.max_new_tokens))

    def work(self, contenders: int) -> int:
        """Tokens to decode in all, at most: the unit of progress."""
        warm = WARM_TOKENS * (len(self.prompts) + len(self.calibration))
        calibrate = self.calibration_settings.max_new_tokens * len(self.calibration)
        return contenders * (warm + calibrate + self.settings.max_new_tokens * len(self.prompts) * self.repeats)


@dataclass(frozen=True)
class Measured:
    """Per contender's name: the ledger of the measured decodes, and its calibrated costs (None without rounds)."""

    ledgers: dict[str, Ledger]
    costs: dict[str, Costs | None]


def run(target: Target, contenders: Sequence[Contender], plan: Plan, steps: Steps) -> Measured:
    """Measure the contenders, the baseline among them, one prompt at a time (batch 1).

    Every shape is warmed up; then costs are calibrated; then, for each repeat and prompt, all contenders decode it one
    after the other, and who begins moves on with each prompt, so that drift of the machine falls on all alike.
    """
    warm = replace(plan.settings, max_new_tokens=WARM_TOKENS)
    steps.heading("warm up")
    for _, ids, contender in _turns(contenders, [*plan.calibration, *plan.prompts], 1):
        decode(target, contender.drafter, [ids], warm, controller=contender.controller)
        steps.advance(WARM_TOKENS)

    steps.heading("calibrate")
    calibrated = _decode_all(target, contenders, plan.calibration, plan.calibration_settings, 1, steps)
    steps.heading("measure")
    ledgers = _decode_all(target, contenders, plan.prompts, plan.settings, plan.repeats, steps)
    return Measured(ledgers, {name: costs(ledger, calibrated[BASELINE]) for name, ledger in calibrated.items()})


def _decode_all(
    target: Target,
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    settings: Settings,
    repeats: int,
    steps: Steps,
) -> dict[str, Ledger]:
    ledgers = {contender.name: Ledger() for contender in contenders}
    for turn, ids, contender in _turns(contenders, prompts, repeats):
        number = turn % len(prompts)
        # one seed a repeat and prompt, the same for all contenders
        seeded = replace(settings, seed=settings.seed * 1_000_003 + turn)
        ledger = decode(target, contender.drafter, [ids], seeded, controller=contender.controller)
        ledgers[contender.name].absorb(ledger, [number])
        steps.advance(settings.max_new_tokens)
    for ledger in ledgers.values():
        ledger.check()
    return ledgers


def _turns(
    contenders: Sequence[Contender], prompts: Sequence[list[int]], repeats: int
) -> Iterator[tuple[int, list[int], Contender]]:
    """(turn, ids, contender): every contender on a prompt before the next prompt, the first of them changing."""
    for repeat in range(repeats):
        for number, ids in enumerate(prompts):
            turn = repeat * len(prompts) + number
            first = (number + repeat) % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                yield turn, ids, contender
