"""A pilot: heads trained for some minutes on growing shares of the data, and a curve through what they replay to.

The curve is tau(n) = limit - gap * (n / n_0)^-power over the tokens n of a share, n_0 those of the smallest: a power law that
saturates. What it says of the whole set is an extrapolation, with an interval for the curve's parameters and not for whether
the law holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from scipy.optimize import curve_fit
from scipy.stats import t as student

from data_prep.store import FeatureStore
from heads.errors import HeadwayError
from train.method import Method
from train.recipe import Recipe
from train.sampler import plan, split_rows
from train.steps import Steps

SHARES = range(6, 3, -1)  # how many, the most that the minutes allow; each is twice the one before
WINDOWS = 4  # steps an epoch that the smallest share must make
TIMED = 3


@dataclass(frozen=True)
class Point:
    """The replayed tau after training on `tokens`, and its standard error over the replay's rounds."""

    tokens: int
    tau: float
    error: float


@dataclass(frozen=True)
class Forecast:
    """What the curve says of a number of tokens: tau, a 95 % interval of it, and the curve's limit."""

    tau: float
    low: float
    high: float
    limit: float


def saturating(ratio: np.ndarray, limit: float, gap: float, power: float) -> np.ndarray:
    """tau at n = ratio * n_0."""
    return limit - gap * ratio**-power


def forecast(points: Sequence[Point], tokens: int, most: float) -> Forecast:
    """Fit the curve to at least four points and read it at `tokens`; no tau lies outside 1 to `most`.

    Points weigh by their errors; where they lie further from the curve than these allow, the interval is widened as much.
    Raises HeadwayError where no curve is found.
    """
    unit, tau = points[0].tokens, np.array([point.tau for point in points])
    ratio = np.array([point.tokens / unit for point in points])
    error = np.array([max(point.error, 1e-3) for point in points])
    start = [min(most, tau.max() + 0.1), max(0.0, tau.max() + 0.1 - tau[0]), 0.5]
    limits = ([1.0, 0.0, 0.02], [most, 2 * most, 3.0])
    try:
        fitted, covariance = curve_fit(
            saturating, ratio, tau, p0=start, sigma=error, absolute_sigma=True, bounds=limits, max_nfev=5000
        )
    except RuntimeError as failure:
        listed = ", ".join(f"{point.tau:.3f} at {point.tokens:,}" for point in points)
        raise HeadwayError(
            f"pilot: no saturating curve goes through tau {listed} ({failure}); give it more minutes"
        ) from failure
    limit, gap, power = fitted
    degrees = len(points) - len(fitted)
    misfit = float((((saturating(ratio, *fitted) - tau) / error) ** 2).sum()) / degrees
    far = tokens / unit
    slope = np.array([1.0, -(far**-power), gap * far**-power * np.log(far)])
    half = student.ppf(0.975, degrees) * np.sqrt(max(1.0, misfit) * float(slope @ covariance @ slope))
    at = float(saturating(np.array([far]), *fitted)[0])
    low, high = (float(np.clip(bound, 1.0, most)) for bound in (at - half, at + half))
    return Forecast(float(np.clip(at, 1.0, most)), low, high, float(limit))


def share_sizes(affordable: float, smallest: int, whole: int) -> list[int]:
    """Tokens of each share, doubling: together at most `affordable`, the largest at most half of `whole`; [] where none fit."""
    for count in SHARES:
        first = int(min(affordable / (2**count - 1), whole / 2**count))
        if first >= smallest:
            return [first * 2**number for number in range(count)]
    return []


def pilot(recipe: Recipe, store: FeatureStore, accelerator: Accelerator, make: Callable[[], Method]) -> Forecast:
    """Train for about `recipe.pilot` minutes on growing shares and print the forecast for the whole store; nothing is written.

    `make`: a new method with its head, the same each time. Every share is trained for the recipe's epochs with its schedule and
    validated on the same held-out conversations. Raises HeadwayError where minutes or store do not suffice.
    """
    assert recipe.pilot is not None
    if recipe.optim.max_steps is not None:
        raise HeadwayError("recipe: optim.max_steps goes with no pilot, which speaks of whole epochs; set it to null")
    begun, optim = time.monotonic(), recipe.optim
    training, validation = split_rows(store, recipe.data.held_out)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    rows = [training[place] for place in order]
    whole = sum(store.lengths[row] for row in rows)

    def steps_over(share: Sequence[int]) -> Steps:
        set_seed(recipe.seed)
        method = make()
        torch.manual_seed(recipe.seed + accelerator.process_index)
        windows = plan(
            share,
            store.lengths,
            batch_tokens=optim.batch_tokens,
            epochs=optim.epochs,
            max_steps=None,
            seed=recipe.seed,
        )
        return Steps(method, recipe, store, accelerator, windows, validation)

    steps = steps_over(rows)
    most = 1.0 + len(steps.method.weights)
    speed, validation_s = timed(steps)
    free(steps)
    left = recipe.pilot * 60 - (time.monotonic() - begun) - SHARES[0] * validation_s
    affordable, smallest = _agreed([speed * left / optim.epochs, WINDOWS * optim.batch_tokens])
    sizes = share_sizes(affordable, int(smallest), whole)
    if not sizes:
        need = (2 ** SHARES[-1] - 1) * WINDOWS * optim.batch_tokens * optim.epochs / speed / 60
        raise HeadwayError(
            f"recipe: pilot is {recipe.pilot} minutes; at {speed:,.0f} tokens/s the fewest shares take {need:,.1f} minutes, and the "
            f"{whole:,} tokens of {store.folder} must make {WINDOWS * 2 ** SHARES[-1]} steps; give more minutes, or train on it all"
        )
    points = []
    for size in sizes:
        share = rows[: _reaching(size, [store.lengths[row] for row in rows])]
        steps = steps_over(share)
        for window in steps.windows:
            steps.train_step(window)
        made = steps.validate()
        free(steps)
        tokens = sum(store.lengths[row] for row in share)
        points.append(Point(tokens, made["replayed_tau"], made["replayed_tau_error"]))
        accelerator.print(f"pilot: {tokens:,} tokens, replayed tau {points[-1].tau:.3f} +- {points[-1].error:.3f}")
    found = forecast(points, whole, most)
    accelerator.print(
        f"pilot: extrapolated {whole / points[-1].tokens:.1f} times beyond the largest share, to all {whole:,} tokens: replayed tau "
        f"{found.tau:.2f} [{found.low:.2f}, {found.high:.2f}] (95 % for the curve's parameters, if a saturating power law holds "
        f"that far; its limit is {found.limit:.2f}); not a measurement; nothing was written"
    )
    return found


def timed(steps: Steps) -> tuple[float, float]:
    """(tokens per second of a few steps, seconds of a validation)."""
    windows = steps.windows[: 1 + TIMED]
    rows = [steps.train_step(window) for window in windows]
    rows = rows[1:] or rows
    begun = time.monotonic()
    steps.validate()
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows), time.monotonic() - begun


def free(steps: Steps) -> None:
    """Let go of a head, its optimizer and its engine before the next one."""
    steps.model, steps.optimizer = steps.accelerator.free_memory(steps.model, steps.optimizer)


def _agreed(values: list[float]) -> list[float]:
    """The first process's values, in all of them: clocks differ."""
    return broadcast_object_list(values)


def _reaching(size: int, lengths: Sequence[int]) -> int:
    """How many of `lengths` together reach `size`."""
    return int(np.searchsorted(np.cumsum(lengths), size)) + 1
