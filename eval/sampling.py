"""From logits to the target's law: temperature, top-k, top-p, min-p, penalties, biases and bad words in one function.

The same function is applied at every verified position and for the bonus token. The order is transformers': logit
bias, repetition penalty, (presence and frequency penalties), bad words, temperature, top-k, top-p, min-p. Temperature
0 is the one-hot law on the first largest logit.

Shape suffixes: R rows (one position each), T context positions, E positions added to a context, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eval.law import Dense, Law, PointMass
from heads.errors import HeadwayError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The default is greedy.

    temperature         >= 0; 0 is greedy.
    top_k               keep the k largest logits (ties with the k-th stay); 0: off.
    top_p, min_p        nucleus mass in (0, 1]; least probability as a share of the largest, in [0, 1].
    repetition_penalty  > 0; divides (or, below zero, multiplies) logits of tokens in prompt or output; 1: off.
    presence_penalty    subtracted from logits of tokens that are in the output; 0: off.
    frequency_penalty   subtracted once for each time a token is in the output; 0: off.
    logit_bias          token id -> number added to its logit.
    bad_words           id sequences that may not be completed; a sequence of one id is never emitted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        # Frozen to tuples, so that the settings can be hashed and their device tensors kept.
        object.__setattr__(
            self, "logit_bias", tuple(sorted((int(i), float(b)) for i, b in dict(self.logit_bias).items()))
        )
        object.__setattr__(self, "bad_words", tuple(tuple(int(i) for i in word) for word in self.bad_words))
        for fine, remedy in (
            (self.temperature >= 0, f"temperature {self.temperature} must be at least 0 (0 is greedy)"),
            (self.top_k >= 0, f"top_k {self.top_k} must be at least 0 (0 is off)"),
            (0 < self.top_p <= 1, f"top_p {self.top_p} must be above 0 and at most 1 (1 is off)"),
            (0 <= self.min_p <= 1, f"min_p {self.min_p} must be between 0 and 1 (0 is off)"),
            (self.repetition_penalty > 0, f"repetition_penalty {self.repetition_penalty} must be above 0 (1 is off)"),
            (all(self.bad_words), "bad_words holds an empty sequence; remove it"),
        ):
            if not fine:
                raise HeadwayError(f"sampling: {remedy}")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as sorted pairs of token id and number."""
        return tuple(self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Temperature 0."""
        return self.temperature == 0

    @property
    def needs_context(self) -> bool:
        """Whether the law depends on the tokens before it other than through the logits."""
        penalties = (self.repetition_penalty != 1, self.presence_penalty != 0, self.frequency_penalty != 0)
        return any(penalties) or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True)
class Context:
    """The tokens before each row's position: `ids_RT[r, : length_R[r]]`, the output from `start_R[r]` on."""

    ids_RT: Tensor
    length_R: Tensor
    start_R: Tensor

    @staticmethod
    def of(rows: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device | str = "cpu") -> Context:
        """From host lists of any lengths; `starts[r]` is the prompt's length, where the output begins."""
        width = max(map(len, rows))
        ids = [[*row, *[0] * (width - len(row))] for row in rows]
        lengths = torch.tensor([[len(row), start] for row, start in zip(rows, starts, strict=True)])
        length_R, start_R = lengths.to(device).unbind(1)
        return Context(torch.tensor(ids, dtype=torch.int64).to(device), length_R, start_R)

    def extended(self, more_RE: Tensor, counts_R: Tensor) -> Context:
        """The context followed by `more_RE[r, : counts_R[r]]`, e.g. a draft path; no copy to the host."""
        padded_RT = torch.nn.functional.pad(self.ids_RT, (0, more_RE.shape[1]))
        index_RE = self.length_R[:, None] + torch.arange(more_RE.shape[1], device=more_RE.device)
        return Context(padded_RT.scatter(1, index_RE, more_RE), self.length_R + counts_R, self.start_R)

    def counts(self, like_RV: Tensor, output_only: bool) -> Tensor:
        """How often each token occurs before the position: [R, V] in the dtype of `like_RV`."""
        position_T = torch.arange(self.ids_RT.shape[1], device=self.ids_RT.device)
        inside_RT = position_T < self.length_R[:, None]
        if output_only:
            inside_RT &= position_T >= self.start_R[:, None]
        return torch.zeros_like(like_RV).scatter_add_(1, self.ids_RT, inside_RT.to(like_RV.dtype))

    def ends_with(self, suffix_E: Tensor) -> Tensor:
        """Bool [R]: are the last tokens before the position equal to `suffix_E`?"""
        index_RE = self.length_R[:, None] - suffix_E.shape[0] + torch.arange(suffix_E.shape[0], device=suffix_E.device)
        return ((self.ids_RT.gather(1, index_RE.clamp(min=0)) == suffix_E) & (index_RE >= 0)).all(1)


@lru_cache(maxsize=256)
def _device_ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _device_bias(
    bias: tuple[tuple[int, float], ...], vocab_size: int, like: tuple[torch.dtype, torch.device]
) -> Tensor:
    bias_V = torch.zeros(vocab_size, dtype=like[0])
    for token, value in bias:
        bias_V[token] = value
    return bias_V.to(like[1])


def _penalised(scores_RV: Tensor, sampling: Sampling, context: Context) -> Tensor:
    """Repetition (Keskar et al. 2019, section 4.1), then presence and frequency as in OpenAI's interface."""
    if sampling.repetition_penalty != 1:
        scaled_RV = torch.where(
            scores_RV < 0, scores_RV * sampling.repetition_penalty, scores_RV / sampling.repetition_penalty
        )
        scores_RV = torch.where(context.counts(scores_RV, output_only=False) > 0, scaled_RV, scores_RV)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts_RV = context.counts(scores_RV, output_only=True)
        present_RV = counts_RV.clamp(max=1)
        scores_RV = scores_RV - sampling.frequency_penalty * counts_RV - sampling.presence_penalty * present_RV
    return scores_RV


def _without_bad_words(scores_RV: Tensor, sampling: Sampling, context: Context | None) -> Tensor:
    banned_RV = torch.zeros_like(scores_RV, dtype=torch.bool)
    for word in sampling.bad_words:
        before, last = tuple(word[:-1]), word[-1]
        if not before:
            banned_RV[:, last] = True
        elif context is not None:
            banned_RV[:, last] |= context.ends_with(_device_ids(before, scores_RV.device))
    return scores_RV.masked_fill(banned_RV, -torch.inf)


def _warped(scores_RV: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, top-k, top-p, min-p; dropped tokens become -inf."""
    if sampling.temperature != 1:
        scores_RV = scores_RV / sampling.temperature
    if 0 < sampling.top_k < scores_RV.shape[-1]:
        least_R1 = scores_RV.topk(sampling.top_k).values[:, -1:]
        scores_RV = scores_RV.masked_fill(scores_RV < least_R1, -torch.inf)
    if sampling.top_p < 1:
        ascending_RV, order_RV = scores_RV.sort(descending=False)
        drop_RV = ascending_RV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop_RV[:, -1] = False
        scores_RV = scores_RV.masked_fill(drop_RV.scatter(1, order_RV, drop_RV), -torch.inf)
    if sampling.min_p > 0:
        probs_RV = scores_RV.softmax(-1)
        scores_RV = scores_RV.masked_fill(probs_RV < sampling.min_p * probs_RV.amax(-1, keepdim=True), -torch.inf)
    return scores_RV


def _check_ids(sampling: Sampling, vocab_size: int) -> None:
    named = [token for token, _ in sampling.biases] + [token for word in sampling.bad_words for token in word]
    for token in named:
        if not 0 <= token < vocab_size:
            raise HeadwayError(f"sampling: logit_bias or bad_words names token {token}; the target has {vocab_size}")


def target_law(logits_RV: Tensor, sampling: Sampling, context: Context | None = None) -> tuple[Law, Tensor]:
    """The target's law at R positions, and Bool [R]: was the row's law finite?

    Logits of 16 bits are computed with in float32, float64 stays. The law is a PointMass at temperature 0, else Dense.
    Rows with NaN, +inf or no finite logit give a law of no meaning and False; `check_finite`, or the caller at its own
    synchronisation, turns that into an error. `context` is needed iff `sampling.needs_context`.
    """
    if sampling.needs_context and context is None:
        raise TypeError("penalties and bad words of several tokens need each position's context")
    scores_RV = logits_RV
    if sampling.logit_bias or sampling.bad_words or sampling.needs_context or not sampling.greedy:
        scores_RV = logits_RV.to(torch.float64 if logits_RV.dtype == torch.float64 else torch.float32)
    if sampling.logit_bias or sampling.bad_words:
        _check_ids(sampling, scores_RV.shape[-1])
    if sampling.logit_bias:
        scores_RV = scores_RV + _device_bias(sampling.biases, scores_RV.shape[-1], (scores_RV.dtype, scores_RV.device))
    if context is not None and sampling.needs_context:
        scores_RV = _penalised(scores_RV, sampling, context)
    if sampling.bad_words:
        scores_RV = _without_bad_words(scores_RV, sampling, context)
    if sampling.greedy:
        best_R, ids_R = scores_RV.max(-1)
        return PointMass(ids_R), best_R.isfinite()
    probs_RV = _warped(scores_RV, sampling).softmax(-1)
    # One bad logit makes every probability of its row NaN.
    return Dense(probs_RV), probs_RV[:, 0].isfinite()


def check_finite(finite_R: Tensor, step: int) -> None:
    """Raise HeadwayError naming the first bad row (synchronises with the device)."""
    bad = (~finite_R).nonzero()
    if len(bad):
        raise non_finite(int(bad[0]), step)


def non_finite(row: int, step: int) -> HeadwayError:
    """The error for logits that are NaN, +inf or all -inf."""
    return HeadwayError(
        f"logits of row {row} at output position {step} are not finite; load the target in float32 or bfloat16, "
        "and look for a logit bias or bad words that leave no token"
    )
