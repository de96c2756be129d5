"""The target's states computed while a head is trained: a reader like `data_prep.store.FeatureStore`, but without a disk between.

A store of an 8B target with three taps takes 33 kB a token, of a 70B one 66 kB: 100 M tokens are 3 to 7 TB. Online, the rows that a
process is about to train on go through the target just before, so nothing is stored and every epoch pays for the pass again.
Conversations are rendered, cut and masked by the same code as at collection, and held-out rows keep their states in memory
after their first pass, as every validation reads them.

Where the target is: whole in every process (its rows alone go through it, nothing is sent), or, where one device does not hold
it, tensor-parallel over ALL processes by transformers' own plan for the model. Then every process runs every row of the step
and keeps those that are its own to train on. The other way, ranks of their own for the target, was not taken: they idle
while trainers train and the other way round, a launch would have two kinds of processes, which neither accelerate nor DeepSpeed
knows, and every state would have to be sent. Split over all, the target takes an equal part of each device, and what
crosses between processes are the sums inside its layers, over the fastest links there are.

Rows are read by `read`, by all processes together where the target is split. Shapes: T positions of one conversation, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from data_prep.conversations import read_conversations
from data_prep.plan import Planned, cut_batches, describe, plan
from data_prep.store import FeatureStore, Shard, StoredConversation
from data_prep.target_states import run_target
from heads.errors import sha256_file
from heads.target import Target
from train.recipe import Data, Recipe


def read(store: FeatureStore, rows: Sequence[int]) -> list[StoredConversation]:
    """Several rows at once; online they go through the target together. All processes call it equally often."""
    return store.read(rows) if isinstance(store, OnlineStore) else [store[row] for row in rows]


def text_of(store: FeatureStore, row: int) -> tuple[Tensor, Tensor]:
    """(ids, turn) int64 [T] of a row, without a pass of the target."""
    if isinstance(store, OnlineStore):
        return store.text(row)
    stored = store[row]
    return stored.ids_T, stored.turn_T


@dataclass(frozen=True)
class OnlinePlan:
    """What an online run trains on, known before a weight of the target is loaded; `manifest` says what a store's would."""

    manifest: dict[str, Any]
    planned: list[Planned]

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the manifest: another target, dtype, cut, taps or file makes another run."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()


def plan_online(recipe: Recipe, device: torch.device, say: Callable[[str], None]) -> OnlinePlan:
    """Render the conversations of a recipe that names no store.

    Raises HeadwayError as collection does: for a file that cannot be read, a template that does not fit, a conversation longer
    than the target's positions, and where nothing is supervised.
    """
    data = recipe.data
    assert data.conversations is not None
    source = describe(recipe.target, data.online.dtype, device)
    planned = plan(read_conversations(data.conversations), source, data.max_length, None, say)
    supervised = sum(row.entry.supervised for row in planned)
    manifest = {
        "kind": "online",
        "target": {"name": source.name, "fingerprint": source.fingerprint, "dtype": source.dtype},
        "dtype": source.dtype,
        "hidden_size": source.hidden_size,
        "vocab_size": source.vocab_size,
        "taps": list(recipe.taps()),
        "max_length": data.max_length,
        "conversations": Path(data.conversations).name,
        "conversations_sha256": sha256_file(Path(data.conversations)),
        "totals": {
            "conversations": len(planned),
            "tokens": sum(row.entry.length for row in planned),
            "supervised_tokens": supervised,
        },
    }
    return OnlinePlan(manifest, planned)


class OnlineStore(FeatureStore):
    """Reader of conversations whose states the target computes when they are asked for; ordered by id, as a store is."""

    def __init__(self, planned: OnlinePlan, data: Data, target: Target, accelerator: Accelerator) -> None:
        assert data.conversations is not None
        entries = tuple(row.entry for row in planned.planned)
        file = Path(data.conversations)
        super().__init__(file, planned.manifest, [Shard(file.name, "", 0, "", entries)])
        self._planned = sorted(planned.planned, key=lambda row: row.entry.id)
        self._row_of = {row.entry.id: number for number, row in enumerate(self._planned)}
        self._target, self._accelerator, self._online = target, accelerator, data.online
        self._together = data.online.tensor_parallel and accelerator.num_processes > 1
        self._held_out = {row for rows in self.conversations_by_hash()[: data.held_out] for row in rows}
        self._kept: dict[int, StoredConversation] = {}

    @classmethod
    def load(cls, planned: OnlinePlan, recipe: Recipe, accelerator: Accelerator) -> OnlineStore:
        """With the target of the recipe, whole or split over the processes. Raises HeadwayError as `Target.load` does."""
        online = recipe.data.online
        split = online.tensor_parallel and accelerator.num_processes > 1
        target = Target.load(recipe.target, online.dtype, str(accelerator.device), tensor_parallel=split)
        return cls(planned, recipe.data, target, accelerator)

    def __getitem__(self, index: int) -> StoredConversation:
        return self.read([index])[0]

    def read(self, rows: Sequence[int]) -> list[StoredConversation]:
        """The states of `rows`, in passes over rows of about equal length.

        How rows are put together depends on the calls before and on nothing else, so a resumed run reads the same bits.
        Raises HeadwayError naming the conversation when a state is not finite.
        """
        fresh = self._computed({row for row in rows if row not in self._kept})
        for row in self._held_out & fresh.keys():
            self._kept[row] = fresh[row]
        return [self._kept[row] if row in self._kept else fresh[row] for row in rows]

    def _computed(self, mine: set[int]) -> dict[int, StoredConversation]:
        wanted = mine
        if self._together:
            wanted = {row for each in gather_object([sorted(mine)]) for row in each}
        planned = sorted((self._planned[row] for row in wanted), key=lambda row: (row.entry.length, row.entry.id))
        found = {}
        for batch in cut_batches(planned, self._online.batch_tokens):
            for stored in run_target(self._target, batch, self.taps, self._target.dtype):
                if (row := self._row_of[stored.id]) in mine:
                    found[row] = _own(stored)
        return found

    def text(self, row: int) -> tuple[Tensor, Tensor]:
        """(ids, turn) int64 [T] of a row."""
        planned = self._planned[row]
        return planned.ids_T.long(), planned.turn_T.long()

    def supervised_counts(self) -> Tensor:
        """[V] int64: how often each token id is supervised in these conversations."""
        supervised = torch.cat([row.ids_T[row.turn_T > 0] for row in self._planned])
        return torch.bincount(supervised, minlength=self.manifest["vocab_size"])


def _own(stored: StoredConversation) -> StoredConversation:
    """A row as a store gives it, in memory of its own: not a view that keeps the rest of its pass alive."""
    return replace(
        stored,
        ids_T=stored.ids_T.long(),
        turn_T=stored.turn_T.long(),
        last_TH=stored.last_TH.clone(),
        taps={tap: states_TH.clone() for tap, states_TH in stored.taps.items()},
    )
