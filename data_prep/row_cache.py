"""Key-value caches of batched writing: one that prompts are read into, one whose rows are written on.

Shapes: B rows, N rows that are being read, P tokens of a common prefix, C slots, A key heads, E head size.

Every row ends at the cache's last slot in use and begins where its length puts it, so to a decoder the cache looks like
left-padded texts: transformers' own masks (windows and chunks included) hold, whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

ROOM = 1.25  # slots laid out over those in use: with more of them the rows are moved less often
SPARE = 64


class _Layer(CacheLayerMixin):
    """What the caches below have in common: their layers show as many slots as the cache says."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.seen

    def get_max_length(self) -> int:
        return -1


class _PromptLayer(_Layer):
    """Keys and values [N, A, C, E] of one pass over prompts, behind those of what they all begin with."""

    def __init__(self, cache: Any, prefix: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
        super().__init__(cache)
        self.prefix = prefix

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (
            self._behind(prefix, new) for prefix, new in zip(self.prefix, (key_states, value_states), strict=True)
        )
        self.is_initialized = True
        return self.keys, self.values

    def _behind(self, prefix_APE: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if prefix_APE is None:
            return new
        rows, heads, _, size = new.shape
        padded = torch.cat([new.new_zeros(rows, heads, self._cache.seen, size), new], 2)
        # A row's padding lies before its prefix, so that the prefix joins on to the rest without a gap.
        slots = self._cache.slots_NP[:, None, :, None].expand(-1, heads, -1, size)
        return padded.scatter_(2, slots, prefix_APE.expand(rows, -1, -1, -1))


class PromptCache(Cache):
    """For one pass over the rests of N prompts, left-padded by `padding` tokens, behind a common prefix of P tokens.

    `prefix` holds keys and values [A, P, E] of each layer (None, None where there are none).
    """

    def __init__(
        self, prefix: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]], length: int, padding_N: torch.Tensor
    ) -> None:
        super().__init__(layers=[_PromptLayer(self, held) for held in prefix])
        self.seen = length
        self.slots_NP = padding_N[:, None] + torch.arange(length, device=padding_N.device)


class _RowLayer(_Layer):
    """Keys and values [B, A, C, E] of one layer."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, end = self._cache.first, self._cache.end
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept[:, :, end : end + 1] = new
        return self.keys[:, :, first : end + 1], self.values[:, :, first : end + 1]


class RowCache(Cache):
    """`starts[b]` is the first slot of row b; all rows end before slot `end`, and the slots from `first` on are seen."""

    def __init__(self, layers: int, rows: int) -> None:
        super().__init__(layers=[_RowLayer(self) for _ in range(layers)])
        self.starts = [0] * rows
        self.first = self.end = self.capacity = 0

    @property
    def seen(self) -> int:
        """Slots that a pass sees before its own."""
        return self.end - self.first

    def put(self, rows: Sequence[int], prompts: PromptCache, lengths: Sequence[int]) -> None:
        """Set `rows` to what was read: prompts of `lengths` tokens, aligned at their ends."""
        width = max(lengths)
        if width > self.end:
            self._lay_out(width)
        for row, length in zip(rows, lengths, strict=True):
            self.starts[row] = self.end - length
        self.first = min(self.starts)
        for layer, read in zip(self.layers, prompts.layers, strict=True):
            if not read.is_initialized:  # a layer that reads another one's keys has none of its own
                continue
            if not layer.is_initialized:
                layer.keys, layer.values = (
                    new.new_zeros(len(self.starts), new.shape[1], self.capacity, new.shape[3])
                    for new in (read.keys, read.values)
                )
                layer.is_initialized = True
            index_N = torch.tensor(rows, device=read.keys.device)
            for kept, new in ((layer.keys, read.keys), (layer.values, read.values)):
                kept[index_N, :, self.end - width : self.end] = new[:, :, new.shape[2] - width :]

    def free(self, row: int) -> None:
        """Forget a row's text."""
        self.starts[row] = self.end
        self.first = min(self.starts)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self.starts = [self.starts[row] for row in rows]
        self.first = min(self.starts)
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys, layer.values = layer.keys[index], layer.values[index]

    def begin(self) -> None:
        """Make room for one more token a row."""
        if self.end == self.capacity:
            self._lay_out(self.seen)

    def _lay_out(self, width: int) -> None:
        """Move what is seen so that it ends at slot `width` or later, with room behind it."""
        goal = max(width, self.seen)
        moved = goal - self.end
        capacity = max(self.capacity, int(goal * ROOM) + SPARE)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (self._moved(kept, goal, capacity) for kept in (layer.keys, layer.values))
        self.starts = [start + moved for start in self.starts]
        self.first, self.end, self.capacity = self.first + moved, goal, capacity

    def _moved(self, kept: torch.Tensor, goal: int, capacity: int) -> torch.Tensor:
        seen = kept[:, :, self.first : self.end]
        if capacity > self.capacity:
            kept = kept.new_zeros(*kept.shape[:2], capacity, kept.shape[3])
        else:
            seen = seen.clone()  # source and goal may overlap
        kept[:, :, goal - self.seen : goal] = seen
        return kept
