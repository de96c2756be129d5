"""Slow: on the embedded target in fp32 every greedy answer is transformers' own, in every way there is to decode it."""

from __future__ import annotations

import pytest

from benchmarks import drafters
from benchmarks.identity import HEAD, PROMPTS, measure


@pytest.mark.slow
def test_all_answers_are_generates() -> None:
    runs = measure()["runs"]
    assert {name: run["identical"] for name, run in runs.items()} == {
        "none": PROMPTS,
        "lookup": PROMPTS,
        "medusa": PROMPTS,
    }


@pytest.mark.slow
def test_every_drafter_in_every_batch() -> None:
    """Batches of 1, 2 and 5, padded left and right, shuffled, through `SpeculativeDecoder.generate`; calls one after the other."""
    runs = drafters.measure([str(HEAD)])["runs"]
    assert len(runs) == 1 + len(drafters.FREE) + 1
    assert all(run["identical"] == run["answers"] == 19 for run in runs.values())
