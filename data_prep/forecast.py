"""What a pass will cost, said before it: bytes against the free disk, hours at a measured speed, and how much of what
is supervised a draft vocabulary of some size would cover. Shapes: V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from heads.errors import HeadwayError

QUANTILES = (1 / 2, 1 / 8, 7 / 8)  # of the tokens, in order of length: where the batches of a pilot lie
PILOT_SECONDS = 60.0  # after which a pilot begins no further batch
SIZES = 6  # draft vocabularies to tell of
Row = TypeVar("Row")


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one process, and where the figure is from."""

    tokens_per_second: float
    origin: str

    def hours(self, tokens: int, processes: int = 1) -> str:
        """How long so many tokens take, in words."""
        seconds = tokens / self.tokens_per_second / processes
        each = f", {processes} processes that are each as fast" if processes > 1 else ""
        return f"{seconds / 3600:,.2f} hours at {self.tokens_per_second:,.0f} tokens/s ({self.origin}{each})"


def pilot(batches: Sequence[Sequence[Row]], run: Callable[[Sequence[Row]], int]) -> Speed:
    """Time up to three of `batches`, which lie in order of length; `run` takes one through and returns its tokens.

    Each stands for as many tokens as the others: the speed is their harmonic mean. One row goes through before the
    clock starts, and no batch begins after PILOT_SECONDS. `run` must have finished when it returns (no work left on a
    device).
    """
    run(batches[0][:1])
    places = {min(int(share * len(batches)), len(batches) - 1): None for share in QUANTILES}
    seconds_per_token: list[float] = []
    tokens, began = 0, time.perf_counter()
    for place in places:
        if seconds_per_token and time.perf_counter() - began > PILOT_SECONDS:
            break
        start = time.perf_counter()
        count = run(batches[place])
        seconds_per_token.append((time.perf_counter() - start) / count)
        tokens += count
    speed = len(seconds_per_token) / sum(seconds_per_token)
    return Speed(speed, f"timed now on {tokens:,} tokens in {len(seconds_per_token)} batches")


def given(tokens_per_second: float) -> Speed:
    """A speed known from an earlier run. Raises HeadwayError when it is not positive."""
    if tokens_per_second <= 0:
        raise HeadwayError(f"--tokens_per_second {tokens_per_second}: give a positive number")
    return Speed(tokens_per_second, "as given")


def disk_space(folder: Path, needed: int, remedy: str) -> str:
    """Bytes to be written against the free disk, in words. Raises HeadwayError with `remedy` when they do not fit."""
    free = shutil.disk_usage(nearest(folder)).free
    if needed > free:
        raise HeadwayError(
            f"{folder}: {needed / 1e6:,.1f} MB are to be written and {free / 1e6:,.1f} MB are free; {remedy}"
        )
    return f"{needed / 1e6:,.1f} MB to write, {free / 1e6:,.1f} MB free"


def nearest(path: Path) -> Path:
    """The path itself where it exists, else the closest of its parents that does."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def coverage(counts_V: torch.Tensor) -> dict[int, float]:
    """D -> share of the counted tokens that the D most frequent ones make up; the last D is all that occur.

    `counts_V` [V] int64: how often each token is supervised. The others are the largest powers of two below it.
    """
    cumulative = counts_V.sort(descending=True).values.cumsum(0).tolist()
    distinct = int((counts_V > 0).sum())
    sizes = [2**power for power in range(64) if 2**power < distinct][-SIZES:]
    return {size: cumulative[size - 1] / cumulative[-1] for size in [*sizes, distinct] if size}


def describe_coverage(counts_V: torch.Tensor) -> str:
    """`coverage` in words."""
    shares = ", ".join(f"{size:,}: {share:.1%}" for size, share in coverage(counts_V).items())
    return f"draft vocabulary: share of the supervised tokens that the D most frequent cover: {shares}"
