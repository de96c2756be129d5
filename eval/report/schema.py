"""The shape of report.json, schema 1. Other tools read it: keys may be added, none may change its meaning."""

from __future__ import annotations

from typing import Any, TypedDict

SCHEMA = 1


class TargetInfo(TypedDict):
    """The verified model, as it was measured."""

    name: str
    fingerprint: str
    dtype: str
    device: str


class Settings(TypedDict):
    """What a run was made with. `tree` is None for chains."""

    temperature: float
    top_p: float
    top_k: int
    batch_size: int
    draft_length: int
    tree: list[list[int]] | None


class TauFigures(TypedDict):
    """Mean accepted length; see `eval.metrics.Tau`. `per_prompt` in the order of the prompts that have rounds."""

    micro: float | None
    macro: float | None
    ci95: list[float] | None
    per_prompt: list[float]


class AcceptanceFigures(TypedDict):
    """By depth, depth 1 first; see `eval.metrics.Acceptance`. `rate` is accepted over drafted tokens."""

    conditional: list[float | None]
    marginal: list[float]
    rate: float | None


class SpeedupFigures(TypedDict):
    """Over the baseline loop; `ci95` is about `decode`. `predicted` is tau over a calibrated round's cost.

    `break_even_tau` is that cost in target steps; `slower_share` the share of prompts below 1x.
    """

    decode: float | None
    end_to_end: float | None
    ci95: list[float] | None
    end_to_end_ci95: list[float] | None
    predicted: float | None
    break_even_tau: float | None
    slower_share: float | None
    per_prompt: list[float]


class Divergence(TypedDict):
    """Where an output first leaves the baseline's, in the serving dtype.

    `position` counts output tokens from 0; `margin` is the target's gap between its two highest logits there.
    """

    prompt: int
    position: int
    margin: float


class Lossless(TypedDict):
    """Greedy identity in a pass of its own in fp32, and the divergences in the serving dtype.

    `greedy_identical`: ids equal to the baseline loop's and to transformers' `generate`. `divergences_checked` is
    False for a sampled run, whose texts differ anyway.
    """

    greedy_identical: bool
    greedy_differs: list[str]
    divergences: list[Divergence]
    divergences_checked: bool


class Run(TypedDict):
    """One drafter over all prompts. `head` is None for a draft without training.

    `tokens` counts all outputs, prefill tokens included. `emitted` is a histogram: rounds that emitted 0, 1, 2, ...
    tokens. `latency` gives seconds at the 50th, 90th, 99th percentile, by token and between arrivals.
    `loops` lists the prompts whose text fell into a repetition.
    """

    drafter: str
    head: str | None
    settings: Settings
    prompts: int
    tokens: int
    tau: TauFigures
    acceptance: AcceptanceFigures
    speedup: SpeedupFigures
    seconds: dict[str, float]
    lossless: Lossless
    rounds: int
    emitted: list[int]
    latency: dict[str, list[float]] | None
    loops: list[int]
    verdict: str


class Report(TypedDict):
    """The whole file. `examples` holds the texts of the first prompts; `made_by` versions and machine."""

    schema: int
    target: TargetInfo
    protocol: dict[str, Any]
    runs: list[Run]
    examples: list[dict[str, Any]]
    made_by: dict[str, Any]


def label(run: Run) -> str:
    """What a run is called in tables and charts: the drafter, and its head's folder where it has one."""
    return run["drafter"] if run["head"] is None else f"{run['drafter']} ({run['head']})"
