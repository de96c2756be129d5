"""Batched writing on tiny targets: what `generate` gives alone, whatever shares the batch; sampling by its law."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from data_prep import writer as module
from data_prep.nucleus import Sampler, sample_nucleus
from data_prep.writer import Queue, Text, Writer
from heads.errors import HeadwayError
from heads.target import Target

MOST = 24
ANSWERS: dict[Any, list[int]] = {}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    """The tiny Llama, with stop tokens that it does say."""
    loaded = Target.load(str(tiny_target_dir), "float32", "cpu")
    loaded.eos_ids = tuple(alone(loaded, prompt)[at] for prompt, at in zip(some_prompts(3), (3, 9, 21), strict=True))
    return loaded


def some_prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts, most of them behind a common beginning of 12 tokens."""
    source = random.Random(seed)
    common = source.choices(range(5, 280), k=12)
    return [
        (common if source.random() < 0.8 else []) + source.choices(range(5, 280), k=source.randint(1, longest))
        for _ in range(count)
    ]


def alone(target: Target, prompt: list[int], most: int = MOST) -> list[int]:
    """transformers' greedy answer to one prompt; remembered, as it takes longest here."""
    key = (id(target), target.eos_ids, tuple(prompt), most)
    if key not in ANSWERS:
        prompt_1T = torch.tensor([prompt])
        found = target.model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            do_sample=False,
            max_new_tokens=most,
            eos_token_id=list(target.eos_ids),
            pad_token_id=0,
        )
        ANSWERS[key] = found[0, len(prompt) :].tolist()
    return ANSWERS[key]


@pytest.mark.parametrize("rows", [1, 6, 50])
def test_rows_equal_generate(target: Target, rows: int) -> None:
    prompts = some_prompts(24)
    expected = [alone(target, prompt) for prompt in prompts]
    written = Writer(target, rows).write_all([Text(prompt, MOST) for prompt in prompts])
    assert written == expected
    lengths = {len(ids) for ids in written}
    assert MOST in lengths
    assert len(lengths) > 5  # most ended before, and others took their rows


def test_few_slots_and_small_passes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is moved at almost every step, and prompts read two at a time."""
    prompts = some_prompts(24)
    monkeypatch.setattr("data_prep.row_cache.SPARE", 1)
    monkeypatch.setattr("data_prep.row_cache.ROOM", 1.0)
    monkeypatch.setattr(module, "READ_TOKENS", 80)
    written = Writer(target, 7).write_all([Text(prompt, MOST) for prompt in prompts])
    assert written == [alone(target, prompt) for prompt in prompts]


def test_texts_added_on_the_way(target: Target) -> None:
    """Each answer is asked on about once: a longer prompt than any before, put in while others are being written."""
    prompts = some_prompts(12)
    queue = Queue(Text(prompt, MOST, key=1) for prompt in prompts)
    ended: list[Text] = []
    for text in Writer(target, 5).write(queue):
        ended.append(text)
        if text.key == 1:
            queue.add(Text([*text.prompt, *text.written, 7, 8, 9], MOST, key=2))
    assert len(ended) == 24
    assert [text.prompt for text in ended if text.key == 1] != [text.prompt for text in ended][:12]
    for text in ended:
        assert text.written == alone(target, text.prompt)


def test_most_is_each_texts_own(target: Target) -> None:
    prompts = some_prompts(9)
    written = Writer(target, 4).write_all([Text(prompt, most) for most, prompt in enumerate(prompts, 1)])
    assert written == [alone(target, prompt, most) for most, prompt in enumerate(prompts, 1)]
    assert Writer(target, 4).write_all([]) == []


def _mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**TINY, vocab_size=288, num_key_value_heads=2, sliding_window=9))


def _gemma() -> Any:
    sizes = {"vocab_size": 288, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9}
    return Gemma2ForCausalLM(Gemma2Config(**TINY, **sizes, attn_implementation="eager"))


def _neox() -> Any:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**TINY, vocab_size=288))


@pytest.mark.parametrize("make", [_mistral, _gemma, _neox], ids=["window", "windows and soft caps", "other masks"])
def test_other_architectures(make: Callable[[], Any], tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = make()
        for parameter in model.parameters():  # logits that differ enough for an argmax to mean something
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = 5
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    other = Target.load(str(tmp_path), "float32", "cpu")
    prompts = some_prompts(7, longest=30)
    written = Writer(other, 3).write_all([Text(prompt, 16) for prompt in prompts])
    assert written == [alone(other, prompt, 16) for prompt in prompts]


def test_refusals(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
        with pytest.raises(HeadwayError, match=r"not plain attention \(linear_attention\).*--server"):
            Writer(target, 4)
    with monkeypatch.context() as patch:
        patch.setattr(target.tokenizer, "chat_template", None)
        with pytest.raises(HeadwayError, match="no chat template"):
            Writer(target, 4)
    monkeypatch.setattr(target, "eos_ids", ())
    with pytest.raises(HeadwayError, match="names no stop token"):
        Writer(target, 4)


def test_samples_do_not_depend_on_the_batch(target: Target) -> None:
    sampler = Sampler(1.0, 0.9)
    prompts = some_prompts(10)

    def texts() -> list[Text]:
        return [Text(prompt, MOST, seed) for seed, prompt in enumerate(prompts)]

    together = Writer(target, 10).write_all(texts(), sampler)
    assert Writer(target, 3).write_all(texts(), sampler) == together
    assert Writer(target, 1).write_all(texts()[4:5], sampler) == together[4:5]
    assert Writer(target, 10).write_all([Text(prompt, MOST, 99) for prompt in prompts], sampler) != together


def law_of(logits_V: torch.Tensor, temperature: float, top_p: float) -> list[float]:
    """The law written out: sort, keep tokens until `top_p` is reached, renormalise."""
    weights = sorted(enumerate((logits_V.double() / temperature).exp().tolist()), key=lambda pair: -pair[1])
    total, reached = sum(weight for _, weight in weights), 0.0
    law = [0.0] * len(weights)
    for token, weight in weights:
        if reached < top_p * total:
            law[token] = weight
        reached += weight
    return [weight / sum(law) for weight in law]


def fits(drawn: torch.Tensor, law: list[float]) -> bool:
    """Whether draws from a law of 12 tokens fit it: chi-square with 11 degrees of freedom, p = 0.0005."""
    counts, draws = torch.bincount(drawn, minlength=len(law)).tolist(), len(drawn)
    chi_square = sum((c - draws * p) ** 2 / (draws * p) for c, p in zip(counts, law, strict=True) if p)
    return chi_square < 33.1 and all(count == 0 for count, p in zip(counts, law, strict=True) if p == 0)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.95), (1.0, 0.3), (0.5, 0.7), (2.0, 1.0)])
def test_nucleus_law(temperature: float, top_p: float) -> None:
    draws, generator = 20_000, torch.Generator().manual_seed(5)
    for seed in range(3):
        logits_V = torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 1.5
        drawn = sample_nucleus(
            logits_V.expand(draws, -1), temperature, top_p, lambda rows: torch.rand(len(rows), generator=generator)
        )
        assert fits(drawn, law_of(logits_V, temperature, top_p))


def test_coins_of_texts_are_uniform() -> None:
    """By seed at one place, and by place under one seed; a row that nobody reads does not disturb the others."""
    logits_V = torch.randn(12, generator=torch.Generator().manual_seed(7)) * 1.5
    law, sampler = law_of(logits_V, 0.8, 0.9), Sampler(0.8, 0.9)

    def texts() -> Iterator[list[Text]]:
        yield [Text([1], 9, seed) for seed in range(5000)]
        yield [Text([1], 9, 3, written=[0] * place) for place in range(5000)]

    for rows in texts():
        drawn = sampler(logits_V.expand(len(rows), -1), rows)
        assert fits(drawn, law)
        assert torch.equal(sampler(logits_V.expand(3, -1), [None, rows[1], rows[2]])[1:], drawn[1:3])


def test_logits_that_are_no_numbers() -> None:
    with pytest.raises(HeadwayError, match="not numbers"):
        Sampler(1.0, 1.0)(torch.full((1, 12), torch.nan), [None])


def test_the_target_is_an_ordinary_model(target: Target, tiny_target_dir: Path) -> None:
    """`alone` is transformers' own loop on transformers' own layers, not on what Headway makes of them."""
    plain: Any = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype="float32")
    prompt = some_prompts(1)[0]
    stop = list(target.eos_ids)
    ids = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=MOST, eos_token_id=stop)
    assert ids[0, len(prompt) :].tolist() == alone(target, prompt)
