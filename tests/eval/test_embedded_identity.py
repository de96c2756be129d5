"""Slow: on the embedded target in fp32 every greedy answer of every run is transformers' own (benchmarks/identity.py)."""

from __future__ import annotations

import pytest

from benchmarks.identity import PROMPTS, measure


@pytest.mark.slow
def test_all_answers_are_generates() -> None:
    runs = measure()["runs"]
    assert {name: run["identical"] for name, run in runs.items()} == {
        "none": PROMPTS,
        "lookup": PROMPTS,
        "medusa": PROMPTS,
    }
