"""Feature stores of random numbers, written shard by shard without a target."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_prep.shards import Entry, Layout, StoredConversation, finished_shards, free_names, write_shard
from data_prep.store_manifest import finish

HIDDEN, VOCABULARY, TAPS, TOP_K = 72, 50, (1, 3), 3
RUN: dict[str, Any] = {
    "schema": 2,
    "kind": "features",
    "complete": False,
    "target": {"name": "made-up", "fingerprint": "ab" * 32, "dtype": "float32"},
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "taps": list(TAPS),
    "tap_convention": "entering layer i",
    "tap_format": "bf16",
    "top_k_logits": 0,
    "max_length": 64,
    "conversations": "made-up.jsonl",
    "conversations_sha256": "cd" * 32,
}
PACKED = RUN | {"tap_format": "int8", "top_k_logits": TOP_K}


def make(identity: str, length: int, dtype: torch.dtype = torch.bfloat16) -> StoredConversation:
    random_numbers = torch.Generator().manual_seed(length)

    def states() -> torch.Tensor:
        return torch.randn(length, HIDDEN, generator=random_numbers).to(dtype)

    turn_T = (torch.arange(length) >= 2).long()
    served_T = turn_T.roll(-1) > 0
    top1_T = torch.randint(0, VOCABULARY, (length,), generator=random_numbers)
    return StoredConversation(
        id=identity,
        ids_T=torch.randint(0, VOCABULARY, (length,), generator=random_numbers),
        turn_T=turn_T,
        last_TH=states(),
        taps={tap: states() for tap in TAPS},
        top1_T=torch.where(served_T, top1_T, -1),
        lse_T=torch.rand(length, generator=random_numbers),
        top_k_ids_TK=torch.randint(0, VOCABULARY, (length, TOP_K), generator=random_numbers),
        top_k_logits_TK=torch.rand(length, TOP_K, generator=random_numbers),
    )


def entry_of(row: StoredConversation) -> Entry:
    return Entry(row.id, row.id * 3, len(row.ids_T), int((row.turn_T > 0).sum()))


def write_shards(folder: Path, shards: list[list[StoredConversation]], run: dict[str, Any] = RUN) -> Path:
    folder.mkdir()
    for shard, name in zip(shards, free_names(folder, 0, 1), strict=False):
        write_shard(folder, name, Layout.of(run), [entry_of(row) for row in shard], shard)
    return folder


def make_store(folder: Path, shards: list[list[StoredConversation]], run: dict[str, Any] = RUN) -> Path:
    write_shards(folder, shards, run)
    finish(folder, run, finished_shards(folder, checksums=True))
    return folder


def assert_equal(left: StoredConversation, right: StoredConversation) -> None:
    """Every field of what a reader gave, bit for bit."""
    assert left.id == right.id
    assert left.taps.keys() == right.taps.keys()
    for name in ("ids_T", "turn_T", "last_TH", "top1_T", "lse_T"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert all(torch.equal(left.taps[tap], right.taps[tap]) for tap in left.taps)
    assert_same_logits(left, right)


def assert_same_logits(left: StoredConversation, right: StoredConversation) -> None:
    for one, other in ((left.top_k_ids_TK, right.top_k_ids_TK), (left.top_k_logits_TK, right.top_k_logits_TK)):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def in_fork(run: Callable[[], Any]) -> Any:
    """What `run` returns (as JSON can hold it) in a process that is forked from this one, with all its modules loaded."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write_end, json.dumps(run()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(said)
