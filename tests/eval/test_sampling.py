"""The target's law equals transformers' processors in transformers' order, and brute-force counting for the penalties."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eval.law import Dense, PointMass
from eval.sampling import Context, Sampling, check_finite, target_law
from heads.errors import HeadwayError

VOCAB = 37
TEXTS = [[3, 5, 3, 9], [1], [2, 2, 2, 7, 8, 30, 4], [36, 0, 11, 5, 9]]


def processors(sampling: Sampling) -> LogitsProcessorList:
    """transformers' own, in the order in which `generate` builds them."""
    found = LogitsProcessorList()
    if sampling.biases:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.biases]))
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if sampling.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=1.0, top_k=VOCAB + 10),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.5, top_p=0.05),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=1.0, repetition_penalty=1.3),
    Sampling(temperature=1.0, repetition_penalty=0.8),
    Sampling(temperature=1.0, logit_bias={3: 2.5, 9: -4.0}),
    Sampling(temperature=1.0, bad_words=[[5], [2, 7], [30, 4, 1], [8, 30, 4, 12], [9, 0]]),
    Sampling(
        temperature=0.8,
        top_k=9,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.2,
        logit_bias={4: 1.5},
        bad_words=[[9, 3], [6]],
    ),
]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_law_equals_transformers(sampling: Sampling, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(20):
        # Every other trial has ties, which top-k and top-p must break as transformers does.
        logits_RV = torch.randn(len(TEXTS), VOCAB, generator=generator, dtype=dtype) * 3
        logits_RV = logits_RV.round() if trial % 2 else logits_RV
        context = Context.of(TEXTS, [1] * len(TEXTS)) if sampling.needs_context else None
        law, finite_R = target_law(logits_RV, sampling, context)
        assert isinstance(law, Dense)
        assert finite_R.all()
        assert law.probs_RV.dtype == dtype
        for row, text in enumerate(TEXTS):
            scores_1V = processors(sampling)(torch.tensor([text]), logits_RV[row : row + 1].clone())
            expected_V = scores_1V.softmax(-1)[0]
            assert ((law.probs_RV[row] == 0) == (expected_V == 0)).all(), "the same tokens are left"
            torch.testing.assert_close(
                law.probs_RV[row], expected_V, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0
            )


@pytest.mark.parametrize("start", [0, 1, 3])
def test_presence_and_frequency_count_the_output_alone(start: int) -> None:
    """OpenAI's definition: logit - count * frequency - [count > 0] * presence, the prompt not counted."""
    logits_RV = torch.randn(len(TEXTS), VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.9, presence_penalty=0.4, frequency_penalty=0.25)
    law, _ = target_law(logits_RV, sampling, Context.of(TEXTS, [start] * len(TEXTS)))
    assert isinstance(law, Dense)
    for row, text in enumerate(TEXTS):
        counts = Counter(text[start:])
        scores = [
            (float(logits_RV[row, token]) - 0.25 * counts[token] - 0.4 * (counts[token] > 0)) / 0.9
            for token in range(VOCAB)
        ]
        total = sum(map(math.exp, scores))
        expected_V = torch.tensor([math.exp(score) / total for score in scores], dtype=torch.float64)
        torch.testing.assert_close(law.probs_RV[row], expected_V, rtol=1e-13, atol=0)


def test_temperature_zero_is_the_first_largest_logit() -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    law, finite_R = target_law(logits_RV, Sampling())
    assert isinstance(law, PointMass)
    assert law.ids_R.tolist() == [1, 0]
    assert finite_R.all()
    law, _ = target_law(logits_RV, Sampling(bad_words=[[1]], logit_bias={3: 1.5}))
    assert isinstance(law, PointMass)
    assert law.ids_R.tolist() == [3, 3]


def test_sixteen_bits_are_computed_in_float32() -> None:
    logits_RV = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    law, _ = target_law(logits_RV, Sampling(temperature=0.6, top_p=0.9))
    exact, _ = target_law(logits_RV.float(), Sampling(temperature=0.6, top_p=0.9))
    assert isinstance(law, Dense)
    assert isinstance(exact, Dense)
    assert law.probs_RV.dtype == torch.float32
    assert torch.equal(law.probs_RV, exact.probs_RV)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS[:7]])
def test_non_finite_rows_are_named(bad: float, sampling: Sampling) -> None:
    logits_RV = torch.zeros(3, VOCAB)
    logits_RV[1, 4] = bad
    _, finite_R = target_law(logits_RV, sampling)
    assert finite_R.tolist() == [True, False, True]
    with pytest.raises(HeadwayError, match="row 1 at output position 12"):
        check_finite(finite_R, 12)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_a_row_without_a_token_left_is_an_error_and_some_minus_infinity_is_not(sampling: Sampling) -> None:
    logits_RV = torch.full((2, 4), -math.inf)
    logits_RV[1, 2] = -3.0
    _, finite_R = target_law(logits_RV, sampling)
    assert finite_R.tolist() == [False, True]


def test_context_extended_on_the_device_equals_one_built_anew() -> None:
    drafts = [[4, 4], [7], [], [1, 2]]
    more_RE = torch.tensor([ids + [0] * (2 - len(ids)) for ids in drafts])
    grown = Context.of(TEXTS, [1] * 4).extended(more_RE, torch.tensor([len(ids) for ids in drafts]))
    anew = Context.of([text + ids for text, ids in zip(TEXTS, drafts, strict=True)], [1] * 4)
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.3, bad_words=[[4, 4], [1, 7, 3]])
    logits_RV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    ours, expected = (target_law(logits_RV, sampling, context)[0] for context in (grown, anew))
    assert isinstance(ours, Dense)
    assert isinstance(expected, Dense)
    assert torch.equal(ours.probs_RV, expected.probs_RV)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"bad_words": [[]]},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HeadwayError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_a_bias_on_a_token_the_target_lacks_is_refused() -> None:
    with pytest.raises(HeadwayError, match="token 99"):
        target_law(torch.zeros(1, 4), Sampling(logit_bias={99: 1.0}))


def test_penalties_without_a_context_are_a_programming_error() -> None:
    with pytest.raises(TypeError, match="context"):
        target_law(torch.zeros(1, 4), Sampling(repetition_penalty=1.1))
