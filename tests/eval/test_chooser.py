"""Coins: splitmix64 recomputed with Python's integers, uniform, a function of (seed, position, purpose) alone."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from eval.chooser import ACCEPT, DRAFT, PICK, SPAN, SeededChooser, accepted, coins, invert
from eval.law import Dense, PointMass
from heads.errors import HeadwayError

WORD = (1 << 64) - 1


def mix(state: int) -> int:
    """splitmix64 (Steele, Lea and Flood 2014), one step."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_splitmix_reference_value() -> None:
    """The generator's published first output for seed 1234567."""
    assert mix(1234567) == 6457827717110365317


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 - 1])
def test_coins_equal_integer_arithmetic(seed: int) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    found_BP = coins(torch.tensor([signed]), torch.tensor([[0, 1, 77, 10**6]]), PICK)
    for found, position in zip(found_BP[0].tolist(), (0, 1, 77, 10**6), strict=True):
        assert found == (mix(mix(mix(seed) ^ position) ^ PICK) >> 11) * 2.0**-53


def test_coins_are_uniform_across_seeds_positions_and_purposes() -> None:
    seed_B = torch.arange(200)
    for purpose in (PICK, ACCEPT, ACCEPT + 1, DRAFT):
        table_BP = coins(seed_B, torch.arange(100).expand(200, -1), purpose)
        assert stats.kstest(table_BP.flatten().numpy(), "uniform").pvalue > 1e-3
        for first_B, second_B in ((table_BP[:-1], table_BP[1:]), (table_BP[:, :-1], table_BP[:, 1:])):
            correlation = float(torch.corrcoef(torch.stack([first_B.flatten(), second_B.flatten()]))[0, 1])
            assert abs(correlation) < 4 / 20000**0.5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    law = Dense(torch.full((3, 50), 0.02))
    together, alone = SeededChooser([5, 6, 7]), SeededChooser([6])
    together.begin(torch.tensor([3, 9, 4]))
    alone.begin(torch.tensor([9]))
    live_B = torch.ones(3, dtype=torch.bool)
    for depth in range(4):
        picked_B = together.pick(law, depth, live_B)
        assert picked_B[1] == alone.pick(Dense(law.probs_RV[:1]), depth, live_B[:1])[0]
        assert (picked_B == together.pick(law, torch.full((3,), depth), live_B)).all(), (
            "depths by row are the same coins"
        )


def test_the_targets_own_token_has_one_coin_per_output_position() -> None:
    """A round that starts at 3 and one that starts at 5 give position 6 the same coin; other coins are never reused."""
    law, live_B = Dense(torch.full((1, 10**6), 1e-6)), torch.ones(1, dtype=torch.bool)
    chooser = SeededChooser([1])
    chooser.begin(torch.tensor([3]))
    early = int(chooser.pick(law, 3, live_B)), int(chooser.draft(law, 3, 0, live_B))
    chooser.begin(torch.tensor([5]))
    late = int(chooser.pick(law, 1, live_B)), int(chooser.draft(law, 1, 0, live_B))
    assert early[0] == late[0]
    assert early[1] != late[1]
    assert len({*early, *late}) == 3


def test_coins_at_both_ends() -> None:
    law_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    assert invert(law_BV, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert invert(law_BV, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 3
    assert not accepted(torch.tensor([0.0]), torch.tensor([0.0])).item()
    assert accepted(torch.tensor([1 - 2.0**-24]), torch.tensor([1.0])).item()


def test_the_running_sum_does_not_lose_the_tail() -> None:
    """100,000 tokens of 5e-6 and one of 0.5 at the end: in float32 the sum would be off by far more than a coin."""
    law_BV = torch.full((1, 100_001), 5e-6)
    law_BV[0, -1] = 0.5
    for coin, expected in ((0.25, 50_000), (0.4999, 99_980), (0.5001, 100_000)):
        assert abs(invert(law_BV, torch.tensor([coin], dtype=torch.float64)).item() - expected) <= 1


def test_a_law_that_is_not_a_number_keeps_ids_in_range() -> None:
    for filler in (float("nan"), float("inf"), 0.0):
        ids_B = invert(torch.full((4, 7), filler), torch.rand(4, dtype=torch.float64))
        assert ((ids_B >= 0) & (ids_B < 7)).all()


def test_a_point_mass_needs_no_coin() -> None:
    chooser, live_B = SeededChooser([0, 1]), torch.ones(2, dtype=torch.bool)
    assert chooser.pick(PointMass(torch.tensor([4, 2])), 0, live_B).tolist() == [4, 2]
    assert not chooser._tables


def test_bad_input_is_refused() -> None:
    with pytest.raises(HeadwayError, match="one seed for each row"):
        SeededChooser([])
    with pytest.raises(HeadwayError, match=f"more than {SPAN - 1} tokens"):
        SeededChooser([0]).accept(torch.ones(1), SPAN, 0, torch.ones(1, dtype=torch.bool))


@pytest.mark.parametrize("vocab", [1, 4, 511, 512, 513, 1024, 5000])
def test_the_inverse_is_the_plain_running_sum(vocab: int) -> None:
    """In blocks or not: the first token whose running sum, taken one by one, exceeds coin * total; zeros never."""
    generator = torch.Generator().manual_seed(vocab)
    law_BV = torch.rand(40, vocab, generator=generator, dtype=torch.float64) ** 8
    law_BV[:, torch.rand(vocab, generator=generator) < 0.5] = 0.0
    law_BV[:, vocab // 2] = 0.3
    coin_B = torch.rand(40, generator=generator, dtype=torch.float64)
    coin_B[:2], coin_B[2:4] = 0.0, 1 - 2.0**-53
    for probs, coin, found in zip(law_BV.tolist(), coin_B.tolist(), invert(law_BV, coin_B).tolist(), strict=True):
        level, running = coin * math.fsum(probs), 0.0
        ends = []
        for probability in probs:
            running += probability
            ends.append(running)
        assert probs[found] > 0
        assert ends[found] > level * (1 - 1e-12)
        assert ends[found] - probs[found] <= level * (1 + 1e-12)
