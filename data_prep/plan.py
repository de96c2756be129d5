"""What to collect, decided before a weight of the target is loaded: which conversations, cut where, by which rank.

Shapes: T positions of one conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from data_prep.conversations import Conversation
from data_prep.render import render_all
from data_prep.shards import Entry
from heads.errors import HeadwayError
from heads.target import auto_dtype, fingerprint, resolve, stop_ids


@dataclass(frozen=True)
class Source:
    """What is known of a target without its weights. `stop_ids` end a turn; `max_positions` None = no stated limit."""

    name: str
    fingerprint: str
    dtype: str
    tokenizer: Any
    stop_ids: tuple[int, ...]
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None


@dataclass(frozen=True)
class Planned:
    """A sequence of a conversation to collect: its entry in the store, ids (int32 [T]) and turn numbers (int16 [T])."""

    entry: Entry
    ids_T: torch.Tensor
    turn_T: torch.Tensor


def describe(name: str, dtype: str, device: torch.device) -> Source:
    """What planning needs of a target; its weights are sampled for the fingerprint, not loaded."""
    folder = resolve(name)
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Source(
        name=name,
        fingerprint=fingerprint(folder),
        dtype=str(auto_dtype(dtype, device)).removeprefix("torch."),
        tokenizer=tokenizer,
        stop_ids=_stop_ids(folder, config, tokenizer),
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def _stop_ids(folder: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that the target would stop at if it were loaded."""
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    else:
        generation = GenerationConfig.from_model_config(config)
    return stop_ids(generation, tokenizer)


def parse_taps(text: str, layers: int) -> tuple[int, ...]:
    """`2,15,27` -> (2, 15, 27), sorted. Raises HeadwayError for one that is no layer, or is given twice."""
    try:
        taps = sorted(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise HeadwayError(f"--taps {text}: give layer numbers separated by commas, such as 2,15,27") from error
    if len(set(taps)) < len(taps) or any(not 0 <= tap < layers for tap in taps):
        raise HeadwayError(f"--taps {text}: give distinct layers of this target, 0 to {layers - 1}")
    return tuple(taps)


def sha_of(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def plan(
    conversations: Iterable[Conversation],
    source: Source,
    max_length: int,
    max_tokens: int | None,
    say: Callable[[str], None],
) -> list[Planned]:
    """Render conversations in the order of sha256(id) until `max_tokens` are reached; sequences without a supervised
    token within `max_length` are left out and said. A larger `max_tokens` only adds to a smaller one's choice.

    Raises HeadwayError when nothing is supervised, one is longer than the target's positions, or two get the same id.
    """
    planned: dict[str, Planned] = {}
    bare: list[str] = []
    tokens = split = 0
    for conversation in sorted(conversations, key=lambda each: sha_of(each.id)):
        if max_tokens is not None and tokens >= max_tokens:
            break
        rows = _render(conversation, source, max_length)
        split += len(rows) > 1
        for row in rows:
            if row.entry.id in planned:
                raise HeadwayError(f"two conversations are stored under '{row.entry.id}'; rename the id of one")
            if row.entry.supervised:
                planned[row.entry.id] = row
                tokens += row.entry.length
            else:
                bare.append(row.entry.id)
    if split:
        say(
            f"{split} conversations take several sequences: the chat template rewrites earlier turns, and each answer "
            "is learnt behind what the target saw"
        )
    if bare:
        say(f"{len(bare)} conversations without a supervised token in {max_length} tokens left out, first: {bare[0]}")
    if filled := [identity for identity, row in planned.items() if row.entry.length == max_length]:
        say(
            f"{len(filled)} of {len(planned)} sequences fill the {max_length} tokens of max_length, and what lies behind is "
            f"not learnt (first: {filled[0]})"
        )
    if not planned:
        raise HeadwayError(
            f"no conversation has a supervised token within --max_length {max_length} (first: {bare[0]}); give a larger one"
        )
    return list(planned.values())


def _render(conversation: Conversation, source: Source, max_length: int) -> list[Planned]:
    rows = []
    for rendered in render_all(source.tokenizer, conversation, source.stop_ids, max_length):
        length = len(rendered.ids)
        if source.max_positions is not None and length > source.max_positions:
            raise HeadwayError(
                f"conversation {conversation.id}: {length} tokens, but target '{source.name}' has "
                f"{source.max_positions} positions; give --max_length {source.max_positions}"
            )
        supervised = sum(turn > 0 for turn in rendered.turn)
        rows.append(
            Planned(
                entry=Entry(rendered.id, conversation.content_hash(), length, supervised),
                ids_T=torch.tensor(rendered.ids, dtype=torch.int32),
                turn_T=torch.tensor(rendered.turn, dtype=torch.int16),
            )
        )
    return rows


def refuse_changed(folder: Path, finished: dict[str, Entry], planned: Sequence[Planned]) -> None:
    """Raise HeadwayError for a finished conversation that is no longer wanted, or whose content has changed."""
    wanted = {row.entry.id: row.entry for row in planned}
    remedy = "give a new --out or delete the folder"
    for identity, entry in finished.items():
        if identity not in wanted:
            raise HeadwayError(f"{folder}: holds conversation {identity}, which this run does not take; {remedy}")
        if wanted[identity] != entry:
            raise HeadwayError(f"{folder}: conversation {identity} has changed since it was collected; {remedy}")


def share_of_rank(rows: Iterable[Planned], rank: int, ranks: int) -> list[Planned]:
    """The conversations of one rank (by hash, so that adding some moves none), sorted by length, then id."""
    mine = [row for row in rows if int(sha_of(row.entry.id), 16) % ranks == rank]
    return sorted(mine, key=lambda row: (row.entry.length, row.entry.id))


def cut_shards(rows: Iterable[Planned], shard_tokens: int) -> Iterator[list[Planned]]:
    """Cut greedily, in order, into shards of at most `shard_tokens` tokens (or one longer conversation)."""
    shard: list[Planned] = []
    tokens = 0
    for row in rows:
        if shard and tokens + row.entry.length > shard_tokens:
            yield shard
            shard, tokens = [], 0
        shard.append(row)
        tokens += row.entry.length
    if shard:
        yield shard


def cut_batches(rows: Iterable[Planned], batch_tokens: int) -> Iterator[list[Planned]]:
    """Cut rows sorted by length into batches of at most `batch_tokens` tokens, padding included (or one longer row)."""
    batch: list[Planned] = []
    for row in rows:
        if batch and (len(batch) + 1) * row.entry.length > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
