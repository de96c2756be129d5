"""A target that goes on with token ids, many rows at once, and the law its user turns are drawn from.

Shapes: B rows, T positions, R rows still without a token, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from transformers import DynamicCache

from heads.errors import HeadwayError
from heads.target import Target

DROP_SHARE = 0.125  # rows that must have finished before the cache is copied without them
Pick = Callable[[torch.Tensor], torch.Tensor]


class Writer:
    """A target that goes on with token ids, many rows at once."""

    def __init__(self, target: Target) -> None:
        if not target.eos_ids:
            raise HeadwayError(f"target '{target.name}': names no stop token, so its turns never end; use a chat model")
        if not target.tokenizer.chat_template:
            raise HeadwayError(f"target '{target.name}': its tokenizer has no chat template; use a chat model")
        self.target, self.tokenizer = target, target.tokenizer
        # transformers renamed the argument; both names are in the supported range
        parameters = inspect.signature(type(target.decoder).forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def write(self, prompts: Sequence[list[int]], most: int, pick: Pick) -> list[list[int]]:
        """Up to `most` tokens after each prompt, chosen by `pick` from logits [B, V] as ids [B]; the stop token ends
        a row and is its last id."""
        written: list[list[int]] = [[] for _ in prompts]
        live = list(range(len(prompts)))  # prompt numbers of the cache's rows
        cache, mask_BT, last_BH = self._prefill(prompts)
        ended: set[int] = set()
        for _ in range(most):
            chosen_B = pick(self.target.logits(last_BH).float())
            for row, token in zip(live, chosen_B.tolist(), strict=True):
                if row not in ended:
                    written[row].append(token)
                    if token in self.target.eos_ids or len(written[row]) == most:
                        ended.add(row)
            if len(ended) == len(prompts):
                break
            kept = [index for index, row in enumerate(live) if row not in ended]
            if len(kept) <= len(live) * (1 - DROP_SHARE):
                kept_B = torch.tensor(kept, device=chosen_B.device)
                cache.batch_select_indices(kept_B)
                chosen_B, mask_BT, live = chosen_B[kept_B], mask_BT[kept_B], [live[index] for index in kept]
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(live), 1)], 1)
            last_BH = self._pass(chosen_B[:, None], mask_BT, cache)
        return written

    def _prefill(self, prompts: Sequence[list[int]]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
        """Run the prompts, left-padded; what they all begin with (the system turn) goes through only once."""
        shared = len(
            list(takewhile(lambda tokens: len(set(tokens)) == 1, zip(*(p[:-1] for p in prompts), strict=False)))
        )
        rest = [prompt[shared:] for prompt in prompts]
        longest = max(map(len, rest))
        device, rows = self.target.device, len(prompts)
        pad = self.target.eos_ids[0]
        ids_BT = torch.tensor([[pad] * (longest - len(row)) + row for row in rest], device=device)
        mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rest], device=device)
        cache = DynamicCache(config=self.target.config)
        if shared:
            prefix_1T = torch.tensor([prompts[0][:shared]], device=device)
            self._pass(prefix_1T, torch.ones_like(prefix_1T), cache)
            cache.batch_repeat_interleave(rows)
        mask_BT = torch.cat([mask_BT.new_ones(rows, shared), mask_BT], 1)
        return cache, mask_BT, self._pass(ids_BT, mask_BT, cache)

    def _pass(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """States [B, H] after the last position; `mask_BT` covers the cache and `ids_BT`."""
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        output = self.target.decoder(
            input_ids=ids_BT,
            position_ids=positions_BT,
            attention_mask=None if bool(mask_BT.all()) else mask_BT,  # without one, attention takes its fast path
            use_cache=True,
            **{self.cache_name: cache},
        )
        return output.last_hidden_state[:, -1]


def sample_nucleus(
    logits_BV: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> torch.Tensor:
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
        uniform_B = torch.rand(len(logits_BV), generator=generator, device=logits_BV.device)[open_R]
        weights_RV = cumulative_BV[open_R]
        tokens_R = torch.searchsorted(weights_RV, (uniform_B * weights_RV[:, -1])[:, None], right=True)[:, 0]
        tokens_R = tokens_R.clamp(max=logits_BV.shape[-1] - 1)
        law_RV = probabilities_BV[open_R]
        own_R1 = law_RV.gather(1, tokens_R[:, None])
        above_R = law_RV.where(law_RV > own_R1, 0).sum(-1)
        inside_R = (above_R < top_p) & (own_R1[:, 0] > 0)
        drawn_B[open_R[inside_R]] = tokens_R[inside_R]
        open_R = open_R[~inside_R]
    return drawn_B
