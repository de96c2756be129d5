"""Drawing tokens from the target's law: the whole of it, or its nucleus.

Shapes: B rows, R rows still without a token, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from data_prep.writer import Text
from heads.errors import HeadwayError

UNREAD = Text([], 0)  # of a row that nobody reads
Coins = Callable[[list[int]], torch.Tensor]
"""For each of the given rows its next number, uniform in [0, 1): [R], on the device of the logits."""


class Sampler:
    """Chooses the rows' next ids from softmax(logits / temperature), cut to its nucleus.

    A row's coins hang on its text's seed and on how far it is, so that what is drawn does not depend on which texts
    stand beside it, nor on where a run was interrupted.
    """

    def __init__(self, temperature: float, top_p: float) -> None:
        self.temperature, self.top_p = temperature, top_p

    def __call__(self, logits_BV: torch.Tensor, texts: Sequence[Text | None]) -> torch.Tensor:
        tosses = [0] * len(texts)

        def coins(rows: list[int]) -> torch.Tensor:
            values = []
            for row in rows:
                text = texts[row] or UNREAD
                values.append(_coin(text.seed, len(text.written), tosses[row]))
                tosses[row] += 1
            return torch.tensor(values, device=logits_BV.device)

        return sample_nucleus(logits_BV, self.temperature, self.top_p, coins)


def _coin(seed: int, position: int, toss: int) -> float:
    digest = hashlib.blake2b(f"{seed} {position} {toss}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 40) / 2**24  # as many bits as a float32 holds: never rounded up to 1


def sample_nucleus(logits_BV: torch.Tensor, temperature: float, top_p: float, coins: Coins) -> torch.Tensor:
    """Ids [B] drawn from softmax(logits / temperature) cut to its nucleus: the tokens whose more probable ones weigh
    less than `top_p` together.

    A draw from the whole law is repeated until it lies in the nucleus, which gives the same law as cutting first and
    spares sorting the vocabulary. Raises HeadwayError for logits that are not numbers.
    """
    probabilities_BV = (logits_BV / temperature).softmax(-1)
    if probabilities_BV.isnan().any():
        raise HeadwayError("the target's logits are not numbers; use --dtype float32 or bfloat16")
    cumulative_BV = probabilities_BV.cumsum(-1)
    drawn_B = logits_BV.argmax(-1)
    open_R = torch.arange(len(logits_BV), device=logits_BV.device)  # rows still without a token
    while len(open_R):
        weights_RV = cumulative_BV[open_R]
        uniform_R = coins(open_R.tolist())
        tokens_R = torch.searchsorted(weights_RV, (uniform_R * weights_RV[:, -1])[:, None], right=True)[:, 0]
        tokens_R = tokens_R.clamp(max=logits_BV.shape[-1] - 1)
        law_RV = probabilities_BV[open_R]
        own_R1 = law_RV.gather(1, tokens_R[:, None])
        above_R = law_RV.where(law_RV > own_R1, 0).sum(-1)
        inside_R = (above_R < top_p) & (own_R1[:, 0] > 0)
        drawn_B[open_R[inside_R]] = tokens_R[inside_R]
        open_R = open_R[~inside_R]
    return drawn_B
