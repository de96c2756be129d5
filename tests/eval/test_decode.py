"""The decode loop on tiny random targets: greedy ids equal transformers' `generate`, whatever the draft and the batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from eval.cache import SlotCache
from eval.decode import Settings, decode
from eval.drafters import Drafter
from eval.drafters.lookup import LookupDrafter, RunIndex
from eval.drafters.none import NoDrafter
from eval.passes import TargetPasses
from eval.sampling import Sampling
from eval.tree import DraftTree, TreeShape
from heads.errors import HeadwayError
from heads.target import Target
from tests.eval.scripted import ScriptedDrafter

NEW = 24
LONG = 4  # a prompt whose greedy text does not end within NEW tokens


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(3, 288) for _ in range(length)] for length in (1, 7, 19, 4, 12)]


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt alone through transformers' own generate."""
    texts = []
    for prompt in prompts:
        ids = target.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        texts.append(ids[0, len(prompt) :].tolist())
    return texts


def drafters(prompts: list[list[int]], expected: list[list[int]]) -> list[Drafter]:
    texts = {tuple(prompt): text for prompt, text in zip(prompts, expected, strict=True)}
    return [
        NoDrafter(),
        LookupDrafter(draft_length=4, longest=2),
        ScriptedDrafter(texts, 5, 10**9),
        ScriptedDrafter(texts, 5, 3),
        ScriptedDrafter(texts, 3, 10**9, tree=True),
    ]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_greedy_equals_generate(
    target: Target, prompts: list[list[int]], expected: list[list[int]], number: int, batch: int
) -> None:
    drafter = drafters(prompts, expected)[number]
    for first in range(0, 5, batch):
        ledger = decode(target, drafter, prompts[first : first + batch], Settings(max_new_tokens=NEW))
        assert [output.ids for output in ledger.outputs] == expected[first : first + batch]
        ledger.check()
        for output in ledger.outputs:
            rounds = [row for row in ledger.rounds if row.prompt == output.prompt]
            assert [row.position for row in rounds] == [
                1 + sum(row.emitted for row in rounds[:index]) for index in range(len(rounds))
            ]


def test_a_right_draft_is_accepted_whole(target: Target, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Length 5 and never wrong: every round but the last gives 6 tokens, so ceil(23 / 6) = 4 rounds."""
    ledger = decode(target, drafters(prompts, expected)[2], [prompts[LONG]], Settings(max_new_tokens=NEW))
    assert len(expected[LONG]) == NEW, "this prompt must not end early, or the count below means nothing"
    assert [row.emitted for row in ledger.rounds] == [6, 6, 6, 5]
    assert [row.accepted for row in ledger.rounds] == [5, 5, 5, 5]


def test_cut_at_eos_and_length(target: Target, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """cases.md 22: tokens behind the stop token are verified but not emitted."""
    text = expected[LONG]
    stop = text[3]
    assert stop not in text[:3]
    drafter = drafters(prompts, expected)[2]
    ledger = decode(target, drafter, [prompts[LONG]], Settings(max_new_tokens=NEW, stop_ids=(stop,)))
    assert ledger.outputs[0].ids == text[:4]
    assert ledger.outputs[0].stop == "eos"
    assert [(row.accepted, row.emitted) for row in ledger.rounds] == [(5, 3)]
    ledger.check()


def test_cache_length_is_emitted_minus_one(
    target: Target, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases.md 21: after every round the cache holds the prompt and all output tokens but the last."""
    lengths: list[list[int]] = []
    grow = SlotCache.grow

    def spy(cache: SlotCache, counts_B: torch.Tensor, counts: list[int]) -> None:
        grow(cache, counts_B, counts)
        assert cache.lengths_B.tolist() == cache.lengths
        lengths.append(list(cache.lengths))

    monkeypatch.setattr(SlotCache, "grow", spy)
    ledger = decode(target, drafters(prompts, expected)[3], [prompts[1]], Settings(max_new_tokens=NEW))
    totals = [len(prompts[1])] + [
        len(prompts[1]) + row.position + row.accepted for row in ledger.rounds if row.prompt == 0
    ]
    assert [row[0] for row in lengths] == totals


def test_tree_nodes_equal_their_paths_alone(target: Target, prompts: list[list[int]]) -> None:
    """cases.md 23: states of every node of a ragged batch's trees = those of prompt + path in a plain forward pass."""
    torch.manual_seed(0)
    shape = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    chosen = [prompts[1], prompts[2]]
    passes = TargetPasses(target, 2, 64)
    passes.prefill(chosen)
    tree = DraftTree.static(torch.tensor([5, 6]), torch.randint(3, 288, (2, 6)), shape)
    states = passes.verify(tree)
    for row, prompt in enumerate(chosen):
        for node, path in enumerate(tree.paths()[row].tolist()):
            tokens = [int(tree.tokens_BN[row, step]) for step in path if step >= 0]
            alone = target.states(torch.tensor([[*prompt, *tokens]]))
            torch.testing.assert_close(states.last[row, node], alone.last[0, -1], rtol=0, atol=1e-10)


def test_sampled_text_does_not_depend_on_the_draft_or_the_batch(
    target: Target, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Coins are keyed by output position: the draft and the neighbours change the speed, not one token."""
    settings = Settings(max_new_tokens=NEW, sampling=Sampling(temperature=1.0, top_p=0.9), seed=7)
    alone = decode(target, NoDrafter(), [prompts[2]], settings).outputs[0].ids
    assert alone != expected[2]
    batch = [prompts[2], prompts[0], prompts[4]]
    for drafter in (NoDrafter(), LookupDrafter(3, 1), drafters(prompts, expected)[3]):
        assert decode(target, drafter, batch, settings).outputs[0].ids == alone


@pytest.mark.parametrize(
    ("ids", "longest", "count", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, 2, [9, 1]),
        ([1, 2, 7, 8, 2, 5, 1, 2], 3, 4, [7, 8, 2, 5]),  # 2 ids match before 1 does
        ([4, 5, 4, 6, 4], 3, 3, [6, 4]),  # the most recent match; cut by the end of the text
        ([1, 2, 3], 3, 5, []),
        ([1], 3, 5, []),
    ],
)
def test_lookup_finds_the_latest_longest_match(ids: list[int], longest: int, count: int, found: list[int]) -> None:
    assert RunIndex(longest).continuation(ids, count) == found


def test_bad_requests_are_refused(target: Target) -> None:
    with pytest.raises(HeadwayError, match="max_new_tokens 0"):
        Settings(max_new_tokens=0)
    with pytest.raises(HeadwayError, match="prompt 1 has no tokens"):
        decode(target, NoDrafter(), [[5], []])
    with pytest.raises(HeadwayError, match="has 512 positions, 612 are asked for"):
        decode(target, NoDrafter(), [[5] * 600], Settings(max_new_tokens=12))
    with pytest.raises(HeadwayError, match="draft_length 0"):
        LookupDrafter(draft_length=0)
