"""The controller of draft lengths: on recorded texts by exact costs, and inside the decode loop.

A recorded text holds, for every position, how many drafts would be accepted there; replaying it with a length k walks
t <- t + min(L_t, k) + 1, so the cost of every fixed length is known and the best one is found by trying all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from eval import decode as decode_module
from eval.adaptive import CostLine, LengthController
from eval.contenders import build
from eval.decode import Settings, decode
from eval.drafters.none import NoDrafter
from eval.passes import TargetPasses
from eval.tree import DraftTree
from heads.errors import HeadwayError
from heads.target import States, Target
from heads.truncated import truncate
from tests.eval.scripted import ScriptedDrafter

Cost = Callable[[int], float]
POSITIONS = 4000


def recorded(chances: Sequence[float], seed: int, positions: int = POSITIONS) -> list[int]:
    """Accepted drafts at every position: `chances[k]` is the acceptance at depth k + 1, given the ones before."""
    source = random.Random(seed)
    found = []
    for _ in range(positions):
        length = 0
        while length < len(chances) and source.random() < chances[length]:
            length += 1
        found.append(length)
    return found


def fixed(lengths: Sequence[int], cost: Cost, k: int) -> float:
    at, total = 0, 0.0
    while at < len(lengths):
        at, total = at + min(lengths[at], k) + 1, total + cost(k)
    return total


def controlled(lengths: Sequence[int], cost: Cost, most: int) -> tuple[float, Counter[int]]:
    controller, at, total, used = LengthController(most), 0, 0.0, Counter[int]()
    while at < len(lengths):
        k = controller.choose(1)
        accepted = min(lengths[at], k)
        controller.observe(1, k, [accepted], cost(k))
        at, total = at + accepted + 1, total + cost(k)
        used[k] += 1
    return total, used


# (conditional acceptance by depth, cost of a round by its length; one step without a draft costs 1)
LOSING: dict[str, tuple[list[float], Cost]] = {
    "weak draft": ([0.3] * 8, lambda k: 1 + 0.1 * (k > 0) + 0.4 * k),
    "just too dear": ([0.5] * 8, lambda k: 1 + 0.35 * (k > 0) + 0.3 * k),
    "nothing accepted": ([0.0] * 4, lambda k: 1 + 0.02 * k),
    "rare long matches": ([0.04] + [0.5] * 9, lambda k: 1 + 0.06 * k),
}
WINNING: dict[str, tuple[list[float], Cost]] = {
    "geometric": ([0.7] * 8, lambda k: 1 + 0.08 * k),
    "as long as can be": ([0.9] * 8, lambda k: 1 + 0.02 * k),
    "one token only": ([0.6, 0.3, 0.2, 0.1, 0.1, 0.1], lambda k: 1 + 0.2 * k),
    "one pass for all": ([0.45, 0.4, 0.3], lambda k: 1 + 0.1 * (k > 0) + 0.05 * k),
    "matches run long": ([0.12] + [0.8] * 9, lambda k: 1 + 0.04 * k),
}


@pytest.mark.parametrize("name", LOSING)
def test_where_every_length_loses_it_ends_within_one_percent_of_no_drafting(name: str) -> None:
    chances, cost = LOSING[name]
    for seed in range(3):
        lengths = recorded(chances, seed)
        none = fixed(lengths, cost, 0)
        assert all(fixed(lengths, cost, k) > none for k in range(1, len(chances) + 1))
        total, _ = controlled(lengths, cost, len(chances))
        assert total <= 1.01 * none


@pytest.mark.parametrize("name", WINNING)
def test_where_lengths_win_it_ends_within_five_percent_of_the_best(name: str) -> None:
    chances, cost = WINNING[name]
    for seed in range(3):
        lengths = recorded(chances, seed)
        best = min(fixed(lengths, cost, k) for k in range(1, len(chances) + 1))
        assert best < fixed(lengths, cost, 0)
        total, _ = controlled(lengths, cost, len(chances))
        assert total <= 1.05 * best


def test_a_cost_that_was_seen_long_ago_stays_what_it_was() -> None:
    costs = CostLine()
    for length in (0, 4, 8):
        costs.add(length, 0.01 + 0.001 * length)
    for _ in range(60_000):
        costs.add(2, 0.012)
    assert costs.at(0) == pytest.approx(0.01)
    assert costs.at(2) == pytest.approx(0.012)


def test_it_follows_a_text_that_changes() -> None:
    cost: Cost = lambda k: 1 + 0.05 * (k > 0) + 0.06 * k
    bad, good = recorded([0.05] * 8, 0), recorded([0.75] * 8, 1)
    best = sum(min(fixed(part, cost, k) for k in range(9)) for part in (bad, good))
    total, used = controlled(bad + good, cost, 8)
    assert total <= 1.05 * best
    assert used[0] > 3000  # of 3800 passes over the bad half
    assert sum(count for k, count in used.items() if k >= 3) > 800


def test_costs_are_kept_apart_by_batch() -> None:
    """At 8 rows a draft costs as much as its tokens; at 1 row it is nearly free. The acceptance is the same."""
    controller, source = LengthController(4), random.Random(0)
    used: dict[int, Counter[int]] = {1: Counter(), 8: Counter()}
    for _ in range(400):
        for rows in (1, 8):
            k = controller.choose(rows)
            accepted = [next((d for d in range(k) if source.random() > 0.7), k) for _ in range(rows)]
            controller.observe(rows, k, accepted, 1 + k * (0.05 if rows == 1 else 1.0))
            used[rows][k] += 1
    assert used[1].most_common(1)[0][0] >= 3
    assert used[8].most_common(1)[0][0] == 0


# --- in the loop ------------------------------------------------------------------------------------------------------


class Hand:
    """A clock that stands still between passes; a pass takes 1 second and `per_node` for each draft node."""

    seconds = 0.0

    def __init__(self, *_: object) -> None:
        pass

    def now(self) -> float:
        return Hand.seconds


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), "float64", "cpu")


PROMPTS = [[5, 9, 14, 3], [8, 8, 21], [77, 4, 6, 6, 12, 90]]


@pytest.mark.parametrize(("wrong", "per_node", "expected"), [(10**9, 0.01, 5), (1, 0.05, 0)])
def test_its_decisions_are_in_the_ledger(
    target: Target, monkeypatch: pytest.MonkeyPatch, wrong: int, per_node: float, expected: int
) -> None:
    """Right drafts at little cost are made in full length, wrong ones not at all; the text is the same."""
    settings = Settings(max_new_tokens=150, stop_ids=())
    plain = decode(target, NoDrafter(), PROMPTS[:1], settings).outputs[0].ids
    verify = TargetPasses.verify

    def timed(self: TargetPasses, tree: DraftTree) -> States:
        Hand.seconds += 1 + per_node * (tree.nodes - 1)
        return verify(self, tree)

    monkeypatch.setattr(decode_module, "Clock", Hand)
    monkeypatch.setattr(TargetPasses, "verify", timed)
    drafter = ScriptedDrafter({tuple(PROMPTS[0]): plain}, 5, wrong)
    ledger = decode(target, drafter, PROMPTS[:1], settings, controller=LengthController(5))
    assert ledger.outputs[0].ids == plain
    asked = [row.asked for row in ledger.rounds]
    assert all(row.drafted <= (row.asked or 0) for row in ledger.rounds)
    assert asked[:4] == [0, 5, 2, asked[3]]  # the first look at each
    assert asked.count(expected) > 0.7 * len(asked)
    fixed_ledger = decode(target, drafter, PROMPTS[:1], settings)
    assert {row.asked for row in fixed_ledger.rounds} == {None}


@pytest.mark.parametrize("name", ["lookup", "suffix", "model"])
def test_the_text_is_the_baselines(target: Target, tiny_target_dir: Path, tmp_path: Path, name: str) -> None:
    if name == "model":
        truncate(str(tiny_target_dir), 2, tmp_path / "draft")
        name = f"model:{tmp_path / 'draft'}"
    contender = build(f"adaptive:{name}", target, None)
    settings = Settings(max_new_tokens=60, stop_ids=())
    plain = [output.ids for output in decode(target, NoDrafter(), PROMPTS, settings).outputs]
    asked = set()
    for _ in range(2):
        ledger = decode(target, contender.drafter, PROMPTS, settings, controller=contender.controller)
        assert [output.ids for output in ledger.outputs] == plain
        asked |= {row.asked for row in ledger.rounds}
        ledger.check()
    assert len(asked) > 1


def test_what_has_no_length_is_refused(target: Target) -> None:
    for name in ("none", "lookahead"):
        with pytest.raises(HeadwayError, match="no draft length to choose"):
            build(f"adaptive:{name}", target, None)
    with pytest.raises(ValueError, match="drafts nothing"):
        LengthController(0)
