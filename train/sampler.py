"""Which conversations are held out, and which each optimizer step sees: a pure function of ids, lengths, recipe and seed.

The plan does not depend on the number of processes or on accumulation, and a position in it is a step number: that is all a
resumed run needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data_prep.store import FeatureStore
from heads.errors import HeadwayError


@dataclass(frozen=True)
class Window:
    """One optimizer step: `step` counts from 1, `epoch` from 0; `rows` index the feature store."""

    step: int
    epoch: int
    rows: tuple[int, ...]


def split_rows(store: FeatureStore, held_out: int) -> tuple[list[int], list[int]]:
    """(training, validation) rows of the store: validation are the `held_out` conversations with the smallest SHA-256
    of their ids, whatever else is there."""
    conversations = store.conversations_by_hash()
    if held_out >= len(conversations):
        raise HeadwayError(
            f"recipe: data.held_out is {held_out}, and {store.folder} holds {len(conversations)} conversations; "
            "hold out fewer"
        )
    validation = {row for rows in conversations[:held_out] for row in rows}
    return [row for row in range(len(store)) if row not in validation], sorted(validation)


def plan(
    rows: Sequence[int], lengths: Sequence[int], *, batch_tokens: int, epochs: int, max_steps: int | None, seed: int
) -> list[Window]:
    """Every step of a run. Each epoch shuffles `rows` anew and fills windows up to `batch_tokens` of `lengths[row]`.

    No row is dropped: an epoch's last window is what is left, and a row longer than a window has one to itself.
    """
    windows: list[Window] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        current: list[int] = []
        tokens = 0
        for row in order:
            if current and tokens + lengths[row] > batch_tokens:
                windows.append(Window(len(windows) + 1, epoch, tuple(current)))
                current, tokens = [], 0
            current.append(row)
            tokens += lengths[row]
        windows.append(Window(len(windows) + 1, epoch, tuple(current)))
    return windows[:max_steps]


def shares(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """`rows` dealt into `parts` of about equal tokens; a part is empty when there are fewer rows than parts."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        lightest = min(range(parts), key=lambda part: (load[part], part))
        dealt[lightest].append(row)
        load[lightest] += lengths[row]
    return dealt


def in_chunks(rows: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """`rows` in order, cut into runs of at most `batch_tokens` (or one longer row)."""
    chunks: list[list[int]] = []
    tokens = batch_tokens
    for row in rows:
        if tokens + lengths[row] > batch_tokens:
            chunks.append([])
            tokens = 0
        chunks[-1].append(row)
        tokens += lengths[row]
    return chunks
