"""The `model` drafter: exact texts, a cache that holds the text and nothing else, laws that are the target's."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eval.decode import Settings, decode
from eval.drafters.model import DraftPasses, ModelDrafter
from eval.drafters.none import NoDrafter
from eval.sampling import Sampling
from heads.errors import HeadwayError
from heads.target import Target
from heads.truncated import truncate
from tests.conftest import save_tiny_target

NEW = 20


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def first_layers(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The target's first two layers: often right, not always."""
    folder = tmp_path_factory.mktemp("drafts") / "first-2"
    truncate(str(tiny_target_dir), 2, folder)
    return Target.load(str(folder), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(3, 288) for _ in range(length)] for length in (1, 7, 19, 4, 12)]


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    texts = [target.model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False) for ids in prompts]
    return [text[0, len(ids) :].tolist() for text, ids in zip(texts, prompts, strict=True)]


def outputs(
    target: Target, drafter: ModelDrafter | NoDrafter, prompts: list[list[int]], **more: object
) -> list[list[int]]:
    settings = Settings(max_new_tokens=NEW, **more)  # type: ignore[arg-type]
    return [output.ids for output in decode(target, drafter, prompts, settings).outputs]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_greedy_equals_generate(
    target: Target, first_layers: Target, prompts: list[list[int]], expected: list[list[int]], batch: int
) -> None:
    drafter = ModelDrafter(first_layers, target, 3)
    for first in range(0, 5, batch):
        assert outputs(target, drafter, prompts[first : first + batch]) == expected[first : first + batch]


def test_order_and_earlier_calls_change_nothing(
    target: Target, first_layers: Target, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    drafter = ModelDrafter(first_layers, target, 3)
    order = [3, 0, 4, 2, 1]
    assert outputs(target, drafter, [prompts[number] for number in order]) == [expected[number] for number in order]
    alone = decode(target, ModelDrafter(first_layers, target, 3), [prompts[1]], Settings(max_new_tokens=NEW))
    again = decode(target, drafter, [prompts[1]], Settings(max_new_tokens=NEW))
    assert [row.accepted for row in again.rounds] == [row.accepted for row in alone.rounds]


def test_a_copy_of_the_target_is_always_right(target: Target, prompts: list[list[int]]) -> None:
    """Every draft is accepted, so each round but the last gives 5 tokens; the last draft's key is not yet cached then."""
    ledger = decode(target, ModelDrafter(target, target, 4), prompts, Settings(max_new_tokens=NEW, stop_ids=()))
    assert {row.accepted for row in ledger.rounds} == {4}
    assert [row.emitted for row in ledger.rounds if row.prompt == 2] == [5, 5, 5, 4]


@pytest.mark.parametrize("own", [False, True])
def test_cache_holds_the_text(
    target: Target, first_layers: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """cases.md 20 and 21: before every draft the cache holds text and root, and gives what a pass without cache gives."""
    draft, follow, seen = target if own else first_layers, DraftPasses.follow, []

    def checked(passes: DraftPasses, sequences: list[list[int]]) -> torch.Tensor:
        last_BH = follow(passes, sequences)
        assert passes.cache.lengths == passes.cache.lengths_B.tolist() == [len(ids) for ids in sequences]
        for row, ids in enumerate(sequences):
            alone_H = draft.states(torch.tensor([ids])).last[0, -1]
            torch.testing.assert_close(last_BH[row], alone_H, rtol=0, atol=1e-10)
        seen.append(len(sequences[1]))
        return last_BH

    monkeypatch.setattr(DraftPasses, "follow", checked)
    decode(target, ModelDrafter(draft, target, 3), prompts[1:4], Settings(max_new_tokens=NEW, stop_ids=()))
    assert seen[0] == len(prompts[2]) + 1
    assert len(seen) >= 5


def test_one_pass_a_draft_token(
    target: Target, first_layers: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, widths = DraftPasses._feed, []

    def counted(passes: DraftPasses, ids_BT: torch.Tensor) -> torch.Tensor:
        widths.append(ids_BT.shape[1])
        return feed(passes, ids_BT)

    monkeypatch.setattr(DraftPasses, "_feed", counted)
    ledger = decode(
        target, ModelDrafter(first_layers, target, 3), [prompts[1]], Settings(max_new_tokens=NEW, stop_ids=())
    )
    assert len(widths) == 3 * len(ledger.rounds)
    assert widths[0] == len(prompts[1]) + 1
    # after a chain accepted whole its last token is read together with the target's own
    assert widths[3::3] == [2 if row.accepted == 3 else 1 for row in ledger.rounds[:-1]]


def test_long_texts_outgrow_the_first_cache(target: Target, first_layers: Target) -> None:
    source = random.Random(1)
    prompt = [source.randrange(3, 288) for _ in range(250)]
    plain = outputs(target, NoDrafter(), [prompt, prompt[:9]])
    assert outputs(target, ModelDrafter(first_layers, target, 4), [prompt, prompt[:9]]) == plain


def test_drafts_stop_at_the_last_position(
    target: Target,
    tiny_tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """cases.md 27: 16 positions; draft k of a text of L tokens needs position L + k - 2."""
    folder = save_tiny_target(tmp_path / "short", tiny_tokenizer, seed=0, max_position_embeddings=16)
    drafter = ModelDrafter(Target.load(str(folder), dtype="float64", device="cpu"), target, 4)
    chosen = [prompts[2], prompts[4], prompts[3]]  # 19 tokens: past it from the start; 12; 4
    settings = Settings(max_new_tokens=NEW, stop_ids=())
    with caplog.at_level(logging.WARNING):
        ledger = decode(target, drafter, chosen, settings)
        decode(target, drafter, chosen, settings)
    plain = decode(target, NoDrafter(), chosen, settings)
    assert [output.ids for output in ledger.outputs] == [output.ids for output in plain.outputs]
    for row in ledger.rounds:
        length = len(chosen[row.prompt]) + row.position
        assert row.drafted == min(4, max(0, 17 - length))
    assert len(caplog.records) == 1
    assert "has 16 positions" in caplog.text


def test_another_tokenizer_is_refused(target: Target, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(288)}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    other.eos_token_id = other.pad_token_id = 2
    draft = Target.load(str(save_tiny_target(tmp_path / "other", other)), dtype="float64", device="cpu")
    with pytest.raises(HeadwayError, match=r"288 ids differ, 0 is 'w0' against '<\|endoftext\|>'"):
        ModelDrafter(draft, target)
    words = {**tiny_tokenizer.get_vocab()}
    tiny_more = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str()))
    tiny_more.add_tokens(["<|new|>"])
    tiny_more.eos_token = tiny_more.pad_token = "<|im_end|>"
    draft = Target.load(str(save_tiny_target(tmp_path / "more", tiny_more)), dtype="float64", device="cpu")
    with pytest.raises(HeadwayError, match=r"\(289 tokens\).*1 ids differ, 288 is '<\|new\|>' against None"):
        ModelDrafter(draft, target)
    with pytest.raises(HeadwayError, match="draft_length 0"):
        ModelDrafter(target, target, 0)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(320, 288), (288, 320), (320, 296)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies(
    tiny_tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    tmp_path: Path,
    target_rows: int,
    draft_rows: int,
    temperature: float,
) -> None:
    """Families pad their embeddings differently. A random target does emit ids of its padding; the draft must bear it."""
    padded = [
        Target.load(str(save_tiny_target(tmp_path / name, tiny_tokenizer, vocab_size=rows)), "float64", "cpu")
        for name, rows in (("target", target_rows), ("draft", draft_rows))
    ]
    settings = Settings(max_new_tokens=NEW, stop_ids=(), sampling=Sampling(temperature=temperature))
    ledger = decode(padded[0], ModelDrafter(padded[1], padded[0], 3), prompts[:3], settings)
    assert all(0 <= token < target_rows for output in ledger.outputs for token in output.ids)
    if temperature == 0:
        plain = decode(padded[0], NoDrafter(), prompts[:3], settings)
        assert [output.ids for output in ledger.outputs] == [output.ids for output in plain.outputs]
    if target_rows > draft_rows:
        assert max(token for output in ledger.outputs for token in output.ids) >= draft_rows


SMALL, DEPTH, DRAWS = 5, 3, 4096


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target]:
    """Target and draft over 5 tokens."""
    words = {f"w{number}": number for number in range(SMALL)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    folder = tmp_path_factory.mktemp("small")
    size = {"vocab_size": SMALL, "initializer_range": 0.4, "num_hidden_layers": 2}
    made = [save_tiny_target(folder / str(seed), tokenizer, seed, **size) for seed in (0, 1)]
    return Target.load(str(made[0]), "float64", "cpu"), Target.load(str(made[1]), "float64", "cpu")


def joint_law(target: Target, prompt: list[int], sampling: Sampling) -> torch.Tensor:
    """Probabilities of all texts of DEPTH tokens in lexical order, by plain passes and a softmax written out here."""
    laws = []
    for text in itertools.product(range(SMALL), repeat=DEPTH):
        states = target.states(torch.tensor([[*prompt, *text]]))
        logits_TV = target.logits(states.last[0, len(prompt) - 1 : -1]) / sampling.temperature
        if sampling.top_k:
            logits_TV[logits_TV < logits_TV.topk(sampling.top_k).values[:, -1:]] = -torch.inf
        laws.append(logits_TV.softmax(-1)[torch.arange(DEPTH), torch.tensor(text)].prod())
    return torch.stack(laws)


@pytest.mark.parametrize(
    ("sampling", "sampled"),
    [
        (Sampling(temperature=1.0), True),
        (Sampling(temperature=0.7, top_k=3), True),
        (Sampling(temperature=1.0), False),
    ],
)
def test_sampled_texts_follow_the_target(small: tuple[Target, Target], sampling: Sampling, sampled: bool) -> None:
    """The joint law of three tokens over 4,096 seeds, ragged batches: Pearson's chi-square at a fixed seed."""
    target, draft = small
    prompt = [1, 4, 2]
    law = joint_law(target, prompt, sampling)
    drafter, counts, accepted = ModelDrafter(draft, target, 2, sampled), torch.zeros(SMALL**DEPTH), 0
    for seed in range(0, DRAWS, 512):
        settings = Settings(max_new_tokens=DEPTH, sampling=sampling, stop_ids=(), seed=seed)
        ledger = decode(target, drafter, [prompt] * 511 + [[0] * 9], settings)
        for output in ledger.outputs[:-1]:
            counts[output.ids[0] * SMALL**2 + output.ids[1] * SMALL + output.ids[2]] += 1
        accepted += sum(row.accepted for row in ledger.rounds)
    assert counts[law == 0].sum() == 0
    expected = law * counts.sum()
    rare = expected < 5
    found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    assert chisquare(found[keep].double().numpy(), wanted[keep].numpy()).pvalue > 0.01
    assert accepted > DRAWS / 4, "drafts that are never accepted prove nothing"


def test_a_sampled_text_is_its_own_whatever_the_batch(
    target: Target, first_layers: Target, prompts: list[list[int]]
) -> None:
    drafter = ModelDrafter(first_layers, target, 3)
    sampling = Sampling(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.3)
    alone = outputs(target, drafter, [prompts[2]], sampling=sampling, seed=5)
    assert outputs(target, drafter, [prompts[2], prompts[0], prompts[4]], sampling=sampling, seed=5)[:1] == alone


def test_penalties_count_the_draft_so_far(target: Target, prompts: list[list[int]]) -> None:
    """A copy of the target under penalties is still always right: its laws see prompt, output and earlier drafts."""
    sampling = Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)
    settings = Settings(max_new_tokens=NEW, sampling=sampling, stop_ids=())
    ledger = decode(target, ModelDrafter(target, target, 4), prompts[:3], settings)
    assert {row.accepted for row in ledger.rounds} == {4}
