"""Drafts from n-grams: what the structures find is checked by scanning, what they draft by exact texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eval.decode import Settings, decode
from eval.drafters import Drafter
from eval.drafters.automaton import ROOT, SuffixAutomaton
from eval.drafters.lookup import LookupDrafter, RunIndex
from eval.drafters.none import NoDrafter
from eval.drafters.suffix import LEAST_SHARE, PER_MATCH, Memory, SuffixDrafter
from eval.sampling import Sampling
from heads.errors import HeadwayError
from heads.target import Target

NEW = 24


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Repetitive, so that there is something to find."""
    source = random.Random(3)
    return [[source.randrange(3, 9) for _ in range(length)] for length in (1, 17, 29, 14, 12)]


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    texts = [target.model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False) for ids in prompts]
    return [text[0, len(ids) :].tolist() for text, ids in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("make", [lambda: LookupDrafter(4, 2), lambda: SuffixDrafter(6), lambda: SuffixDrafter(6, 50)])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_greedy_equals_generate(
    target: Target,
    prompts: list[list[int]],
    expected: list[list[int]],
    make: Callable[[], Drafter],
    batch: int,
) -> None:
    """One object for all calls, forwards and then shuffled."""
    drafter = make()
    for order in (list(range(5)), [3, 0, 4, 2, 1]):
        for first in range(0, 5, batch):
            some = order[first : first + batch]
            ledger = decode(target, drafter, [prompts[number] for number in some], Settings(max_new_tokens=NEW))
            assert [output.ids for output in ledger.outputs] == [expected[number] for number in some]


def test_sampled_text_is_that_without_a_draft(target: Target, prompts: list[list[int]]) -> None:
    settings = Settings(max_new_tokens=NEW, sampling=Sampling(temperature=0.8), seed=3, stop_ids=())
    plain = decode(target, NoDrafter(), prompts, settings)
    drafter = SuffixDrafter(6)
    for _ in range(2):  # the second call is told the answers
        ledger = decode(target, drafter, prompts, settings)
        assert [output.ids for output in ledger.outputs] == [output.ids for output in plain.outputs]
    assert sum(row.accepted for row in ledger.rounds) > len(prompts) * NEW / 2


def scan(ids: list[int], longest: int, count: int) -> list[int]:
    """Prompt lookup by looking at every place."""
    for size in range(min(longest, len(ids) - 1), 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                return ids[start + size : start + size + count]
    return []


def test_run_index_finds_what_a_scan_finds() -> None:
    source = random.Random(0)
    for trial in range(40):
        ids, index = [source.randrange(2 + trial % 4)], RunIndex(1 + trial % 3)
        for _ in range(60):
            if source.random() < 0.7:
                assert index.continuation(ids, 4) == scan(ids, index.longest, 4)
            ids = ids + [source.randrange(2 + trial % 4) for _ in range(source.randint(0, 3))]


def longest_end(texts: list[list[int]], ids: list[int], same: bool) -> int:
    """Length of the longest end of `ids` that stands in a text; in `ids` itself only at another place (`same`)."""
    for size in range(len(ids), 0, -1):
        for text in texts:
            for start in range(len(text) - size + 1 - same):
                if text[start : start + size] == ids[-size:]:
                    return size
    return 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_automaton_finds_the_longest_repeated_end(alphabet: int) -> None:
    source = random.Random(alphabet)
    ids, automaton = [], SuffixAutomaton()
    for _ in range(80):
        ids.append(source.randrange(alphabet))
        automaton.add(ids[-1])
        state, length = automaton.repeated()
        assert length == longest_end([ids], ids, same=True)
        assert (state == ROOT) == (length == 0)
        draft = automaton.continuation(state, 6, 0.0)
        if length:
            run = ids[-length:] + draft[:1]
            assert any(ids[start : start + len(run)] == run for start in range(len(ids))), "a token never seen there"


def test_automaton_of_several_texts_follows_another() -> None:
    source = random.Random(5)
    texts = [[source.randrange(3) for _ in range(source.randint(1, 25))] for _ in range(8)]
    texts += [texts[3], texts[4][:9], [*texts[5][4:], 7]]  # repeated, cut, and continued otherwise
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin_text()
        for token in text:
            automaton.add(token)
    assert automaton.tokens == sum(map(len, texts))
    ids, state, length = [], ROOT, 0
    for _ in range(120):
        ids.append(source.choice([0, 0, 1, 2, 7, 9]))
        state, length = automaton.follow(state, length, ids[-1])
        assert length == longest_end(texts, ids, same=False)


@pytest.mark.parametrize(
    ("ids", "draft"),
    [
        # 1 2 was followed by 5, 5 and 6: the frequent one, though 6 is later
        ([1, 2, 5, 9, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 5),
        # followed by 5 and 6 once each: the later one
        ([1, 2, 5, 9, 1, 2, 6, 7, 1, 2], 6),
        ([4, 4, 4, 4], 4),
    ],
)
def test_what_followed_most_often_is_drafted(ids: list[int], draft: int) -> None:
    automaton = SuffixAutomaton()
    for token in ids:
        automaton.add(token)
    state, _ = automaton.repeated()
    assert automaton.continuation(state, 1, 0.0) == [draft]


def test_a_loop_is_drafted_as_a_loop_and_doubt_ends_a_draft() -> None:
    automaton = SuffixAutomaton()
    for token in [7, 1, 2, 3, 1, 2, 3]:
        automaton.add(token)
    assert automaton.continuation(automaton.repeated()[0], 8, 0.2) == [1, 2, 3, 1, 2, 3, 1, 2]
    automaton = SuffixAutomaton()
    for token in [1, 2, 5, 1, 2, 6, 1, 2, 5, 3, 9, 1, 2]:
        automaton.add(token)
    state, length = automaton.repeated()
    # 1 2 was followed by 5, 6, 5: share 2/3; then 5 by 1 and 3: 1/3 in all
    assert length == 2
    assert automaton.continuation(state, 2, 0.3) == [5, 3]
    assert automaton.continuation(state, 2, 0.5) == [5]
    assert automaton.continuation(state, 2, 0.7) == []


def test_reading_is_linear_in_the_text() -> None:
    """States are at most twice the tokens (Blumer et al. 1985), on the texts that are worst for naive ones too."""
    for text in ([1] * 400, [1, 2] * 200, [1] * 200 + [2] * 200, [1, 2, 2] * 133):
        automaton = SuffixAutomaton()
        for token in text:
            automaton.add(token)
        assert len(automaton._next) <= 2 * len(text)


def test_draft_length_follows_the_match() -> None:
    drafter = SuffixDrafter(6)
    drafter.start(2, None, Sampling())  # type: ignore[arg-type]
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8]
    tree = drafter.draft([[*text, 9], [*text, 9, 1, 2, 3]], torch.tensor([9, 3]))
    assert PER_MATCH == 2
    assert LEAST_SHARE < 1
    assert tree.counts_B.tolist() == [2, 6], "1 token matched: 2 drafted; 4 matched: 6 of the most, 6"
    assert tree.tokens_BN.tolist() == [[9, 1, 2, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8, 9]]


def test_memory_holds_the_latest_outputs() -> None:
    memory = Memory(20)
    for text in ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18], [19, 20, 21]):
        memory.add(text)
        assert memory.automaton.tokens <= 20

    def knows(token: int) -> bool:
        return memory.automaton.follow(ROOT, 0, token)[1] == 1

    assert [knows(token) for token in (1, 13, 19)] == [False, True, True]
    memory.add(list(range(100, 200)))
    assert [knows(token) for token in (189, 190, 199)] == [False, True, True]


def test_later_calls_know_earlier_outputs(target: Target, prompts: list[list[int]]) -> None:
    settings = Settings(max_new_tokens=NEW, stop_ids=())
    drafter, forgetful = SuffixDrafter(8), SuffixDrafter(8, remembered=0)
    first = [len(decode(target, made, [prompts[2]], settings).rounds) for made in (drafter, forgetful)]
    second = [len(decode(target, made, [prompts[2]], settings).rounds) for made in (drafter, forgetful)]
    assert first[0] == first[1] == second[1]
    assert second[0] < first[0]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(HeadwayError, match="suffix: draft_length 0"):
        SuffixDrafter(0)
    with pytest.raises(HeadwayError, match="remembered -1"):
        SuffixDrafter(4, -1)
