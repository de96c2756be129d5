"""Many texts at once through a target's decoder, without a pause: where one ends, the next prompt takes its place.

Shapes: B rows, N rows that are being read, P tokens of a common prefix, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from data_prep.row_cache import PromptCache, RowCache
from heads.errors import HeadwayError
from heads.target import Target

FREE_SHARE = 1 / 8  # rows that must be free before prompts are read into them, or the cache is copied without them
READ_TOKENS = 8192  # of a pass over prompts, padding included
LEAST_PREFIX = 8  # a shorter common beginning is not worth a pass of its own
KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(eq=False)
class Text:
    """A prompt, and what the target wrote after it: at most `most` tokens, a stop token included. `seed` is that of its
    coins where it is sampled, `key` the caller's."""

    prompt: list[int]
    most: int
    seed: int = 0
    key: Any = None
    written: list[int] = field(default_factory=list)


Choose = Callable[[torch.Tensor, Sequence[Text | None]], torch.Tensor]
"""From logits [B, V] (fp32) and the rows' texts (None where nobody reads the row), the next ids [B]."""


def greedy(logits_BV: torch.Tensor, _: Sequence[Text | None]) -> torch.Tensor:
    """The most probable ids [B]."""
    return logits_BV.argmax(-1)


class Queue:
    """Texts to write, the longest prompts first: rows of a pass are about equally long, and lack of memory shows early."""

    def __init__(self, texts: Iterable[Text] = ()) -> None:
        self.texts = sorted(texts, key=lambda text: len(text.prompt))

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, text: Text) -> None:
        """Put one more text in its place."""
        insort(self.texts, text, key=lambda each: len(each.prompt))

    def take(self, most: int) -> list[Text]:
        """Remove up to `most` texts that fit into one pass."""
        taken: list[Text] = []
        while self.texts and len(taken) < most:
            if taken and (len(taken) + 1) * len(taken[0].prompt) > READ_TOKENS:
                break
            taken.append(self.texts.pop())
        return taken


class Writer:
    """A target that goes on with token ids, up to `rows` texts at a time.

    Raises HeadwayError for a target that never stops or is no chat model, or whose layers keep something else than keys
    and values.
    """

    def __init__(self, target: Target, rows: int) -> None:
        if not target.eos_ids:
            raise HeadwayError(f"target '{target.name}': names no stop token, so its turns never end; use a chat model")
        if not target.tokenizer.chat_template:
            raise HeadwayError(f"target '{target.name}': its tokenizer has no chat template; use a chat model")
        odd = set(getattr(target.config, "layer_types", None) or ()) - KNOWN_LAYERS
        if odd or getattr(type(target.model), "_is_stateful", False):
            raise HeadwayError(
                f"target '{target.name}' ({target.config.model_type}): its layers are not plain attention "
                f"({', '.join(sorted(odd)) or 'recurrent'}), so it does not write in batches here; give --server"
            )
        self.target, self.tokenizer, self.rows = target, target.tokenizer, rows
        # transformers renamed the argument; both names are in the supported range
        parameters = inspect.signature(type(target.decoder).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def write(self, queue: Queue, choose: Choose = greedy) -> Iterator[Text]:
        """Yield each text when it is finished. Texts that are added to `queue` meanwhile are written too."""
        count = min(self.rows, len(queue))
        cache, texts = RowCache(self.target.num_layers, count), _Texts(count)
        last_BH = torch.zeros(count, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        while len(queue) or texts.live:
            with torch.inference_mode():
                if len(queue) and texts.many_free:
                    last_BH = self._fill(cache, texts, queue, last_BH)
                chosen_B = choose(self.target.logits(last_BH).float(), texts.rows)
            for row, text in texts.record(chosen_B.tolist(), self.target.eos_ids):
                cache.free(row)
                yield text
            with torch.inference_mode():
                if texts.live and not len(queue) and texts.many_free:
                    kept = texts.drop_free()
                    cache.keep(kept)
                    chosen_B = chosen_B[torch.tensor(kept, device=chosen_B.device)]
                if texts.live:
                    last_BH = self._step(cache, chosen_B)

    def write_all(self, texts: Sequence[Text], choose: Choose = greedy) -> list[list[int]]:
        """What is written after each of the prompts, in their order."""
        for _ in self.write(Queue(texts), choose):
            pass
        return [text.written for text in texts]

    def _fill(self, cache: RowCache, texts: _Texts, queue: Queue, last_BH: torch.Tensor) -> torch.Tensor:
        """Read prompts into the free rows. Returns the states [B, H] behind every row's text."""
        last_BH = last_BH.clone()
        while len(queue) and (free := texts.free):
            taken = queue.take(len(free))
            prompts, rows = [text.prompt for text in taken], free[: len(taken)]
            read, last_NH = self._read(prompts)
            cache.put(rows, read, [len(prompt) for prompt in prompts])
            last_BH[rows] = last_NH
            texts.put(rows, taken)
        return last_BH

    def _read(self, prompts: Sequence[list[int]]) -> tuple[PromptCache, torch.Tensor]:
        """Keys and values of prompts, and the states [N, H] behind them. What all begin with goes through once."""
        bodies = (prompt[:-1] for prompt in prompts)
        shared = len(list(takewhile(lambda tokens: len(set(tokens)) == 1, zip(*bodies, strict=False))))
        if shared < LEAST_PREFIX or len(prompts) == 1:
            return self._read_behind([(None, None)] * self.target.num_layers, 0, prompts)
        prefix, _ = self._read([prompts[0][:shared]])
        held = [(layer.keys[0], layer.values[0]) if layer.is_initialized else (None, None) for layer in prefix.layers]
        return self._read_behind(held, shared, [prompt[shared:] for prompt in prompts])

    def _read_behind(
        self, prefix: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]], length: int, rests: Sequence[list[int]]
    ) -> tuple[PromptCache, torch.Tensor]:
        longest, device = max(map(len, rests)), self.target.device
        padding_N = torch.tensor([longest - len(rest) for rest in rests], device=device)
        ids_NT = torch.tensor([[0] * (longest - len(rest)) + rest for rest in rests], device=device)
        slots_C = torch.arange(length + longest, device=device)
        mask_NC = slots_C >= padding_N[:, None]
        positions_NT = (slots_C[length:] - padding_N[:, None]).clamp(min=0)
        cache = PromptCache(prefix, length, padding_N)
        return cache, self._pass(ids_NT, positions_NT, None if bool(mask_NC.all()) else mask_NC, cache)

    def _step(self, cache: RowCache, chosen_B: torch.Tensor) -> torch.Tensor:
        """Append a token to each row; the states [B, H] behind it."""
        cache.begin()
        starts_B = torch.tensor(cache.starts, device=chosen_B.device)
        mask_BC = None
        if max(cache.starts) > cache.first:
            mask_BC = torch.arange(cache.first, cache.end + 1, device=chosen_B.device) >= starts_B[:, None]
        last_BH = self._pass(chosen_B[:, None], cache.end - starts_B[:, None], mask_BC, cache)
        cache.end += 1
        return last_BH

    def _pass(
        self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, mask_BC: torch.Tensor | None, cache: Any
    ) -> torch.Tensor:
        output = self.target.decoder(
            input_ids=ids_BT,
            position_ids=positions_BT,
            attention_mask=None if mask_BC is None else mask_BC.long(),
            use_cache=True,
            **{self._cache_name: cache},
        )
        return output.last_hidden_state[:, -1]


class _Texts:
    """Which text is in which row; None where a row is free."""

    def __init__(self, count: int) -> None:
        self.rows: list[Text | None] = [None] * count

    @property
    def free(self) -> list[int]:
        return [row for row, text in enumerate(self.rows) if text is None]

    @property
    def live(self) -> int:
        return sum(text is not None for text in self.rows)

    @property
    def many_free(self) -> bool:
        return len(self.free) >= max(1, int(len(self.rows) * FREE_SHARE))

    def put(self, rows: Sequence[int], texts: Sequence[Text]) -> None:
        for row, text in zip(rows, texts, strict=True):
            self.rows[row] = text

    def record(self, chosen: Sequence[int], stop_ids: Sequence[int]) -> list[tuple[int, Text]]:
        """Append each row's token; the texts that it ends leave their rows."""
        ended = []
        for row, (text, token) in enumerate(zip(self.rows, chosen, strict=True)):
            if text is not None:
                text.written.append(token)
                if token in stop_ids or len(text.written) == text.most:
                    ended.append((row, text))
                    self.rows[row] = None
        return ended

    def drop_free(self) -> list[int]:
        """Remove the free rows; the numbers of those that stay."""
        kept = [row for row, text in enumerate(self.rows) if text is not None]
        self.rows = [text for text in self.rows if text is not None]
        return kept
