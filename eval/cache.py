"""The decoder's key-value cache: preallocated slots, a slot count per row.

Shapes: B rows, N nodes of a pass, A key heads, C slots, E head size, L path length. A committed token's slot is its
position, in every layer (sliding windows are applied by position in the mask, so no layer forgets). A pass writes its
N nodes behind each row's committed slots; `commit` keeps the accepted path and everything behind it is free again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

BUCKET = 64  # the keys a pass sees are a multiple of this, so that shapes repeat
FIXED_BUCKET = 512  # slots of a cache of fixed shape are a multiple of this


class _SlotLayer(CacheLayerMixin):
    """Keys and values [B, A, C, E] of one layer."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def empty(like: torch.Tensor) -> torch.Tensor:
            # zeros, not empty: a masked slot's value is still multiplied by weight 0, and 0 x NaN is NaN
            return like.new_zeros(like.shape[0], like.shape[1], self._cache.capacity, like.shape[3])

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's keys and values [B, A, N, E] to its slots and return the slots in view [B, A, view, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, results = self._cache, []
        view, start = cache.view, cache.start
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            assert kept is not None
            if start is not None:
                kept[:, :, start : start + new.shape[2]] = new
            else:
                kept.scatter_(2, cache.slots_BN[:, None, :, None].expand_as(new), new)
            results.append(kept[:, :, :view])
        return results[0], results[1]

    def move(self, source_BL: torch.Tensor, goal_BL: torch.Tensor) -> None:
        """Copy slots `source` to slots `goal`, row by row."""
        for kept in (self.keys, self.values):
            assert kept is not None
            shape = (*source_BL.shape, kept.shape[1], kept.shape[3])
            source, goal = (slots[:, None, :, None].expand(shape[0], shape[2], shape[1], shape[3])
                            for slots in (source_BL, goal_BL))  # fmt: skip
            kept.scatter_(2, goal, kept.gather(2, source))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.view, 0

    def get_seq_length(self) -> int:
        return self._cache.view

    def get_max_length(self) -> int:
        return self._cache.capacity


class SlotCache(Cache):
    """Cache for `rows` sequences of at most `capacity` tokens, tree nodes of the running pass included.

    `lengths_B` (on the device) and `lengths` (on the host) are the committed tokens of each row. `fixed`: every pass sees
    all slots and writes by index, so that passes of one number of nodes are one compiled graph.
    """

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device, fixed: bool = False) -> None:
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])
        self.fixed, self.bucket = fixed, FIXED_BUCKET if fixed else BUCKET
        self.capacity = -(-capacity // self.bucket) * self.bucket
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.lengths = [0] * rows
        self.view = 0
        self.start: int | None = None
        self.slots_BN = torch.zeros(rows, 0, dtype=torch.long, device=device)

    def begin(self, nodes: int, behind: int = 0) -> None:
        """Prepare a pass of `nodes` nodes a row, whose slots come after `behind` others that are not committed.

        Raises ValueError when they do not fit.
        """
        need = max(self.lengths) + behind + nodes
        if need > self.capacity:
            raise ValueError(f"cache of {self.capacity} slots, {need} needed")
        self.view = self.capacity if self.fixed else min(self.capacity, -(-need // BUCKET) * BUCKET)
        # rows of one length (a single row, above all) are written as one block
        self.start = self.lengths[0] + behind if len(set(self.lengths)) == 1 and not self.fixed else None
        self.slots_BN = self.lengths_B[:, None] + torch.arange(behind, behind + nodes, device=self.lengths_B.device)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row: a cache that is too small at least doubles, and keeps what it holds."""
        if tokens <= self.capacity:
            return
        capacity = -(-max(tokens, 2 * self.capacity) // self.bucket) * self.bucket
        for layer in self.layers:
            if layer.is_initialized:
                more = (0, 0, 0, capacity - self.capacity)
                layer.keys, layer.values = (F.pad(kept, more) for kept in (layer.keys, layer.values))
        self.capacity = capacity

    def move_path(self, path_BL: torch.Tensor) -> None:
        """Gather the nodes `path_BL` (indices into the pass, -1 padded) into the slots behind each row's tokens."""
        count = path_BL.shape[1]
        steps_L = torch.arange(count, device=path_BL.device)
        goal_BL = self.lengths_B[:, None] + steps_L
        # padding copies a slot onto itself
        source_BL = torch.where(path_BL < 0, goal_BL, self.lengths_B[:, None] + path_BL)
        for layer in self.layers:
            if layer.is_initialized:  # a layer that reads another one's keys has none of its own
                layer.move(source_BL, goal_BL)

    def grow(self, counts_B: torch.Tensor, counts: list[int]) -> None:
        """Count `counts` more tokens of each row as committed: the same numbers on the device and on the host."""
        self.lengths_B = self.lengths_B + counts_B
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
