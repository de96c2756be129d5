"""The feature store: what the frozen target computed over conversations, on disk, for training heads offline.

    python data_prep/store.py info DIR      what it holds, and the bytes of each part
    python data_prep/store.py verify DIR    every checksum

A store is a folder of shards (shards.py), `supervised_counts.safetensors` and `manifest.json` (store_manifest.py), written
in that order. Shapes: T positions of one conversation, H hidden, K top-k logits, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from rich.progress import track
from safetensors import safe_open

from data_prep.packed_states import PACKED, unpack
from data_prep.shards import (
    Entry,
    Layout,
    Shard,
    StoredConversation,
    entries_by_id,
    finished_shards,
    read_shard,
    sidecars,
)
from data_prep.store_manifest import COUNTS, MANIFEST, read_manifest, refuse_unlisted
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, run_script, sha256_file


class StoredTaps(Mapping[int, torch.Tensor]):
    """Taps of one conversation, each read and unpacked when it is asked for: a method pays for those that it reads alone.

    [T, H] in the store's dtype, views of the mapped file; float32 where they are stored in 8 bits.
    """

    def __init__(self, tensors: Any, span: slice, layout: Layout) -> None:
        self._tensors, self._span, self._layout = tensors, span, layout

    def __getitem__(self, tap: int) -> torch.Tensor:
        if tap not in self._layout.taps:
            raise KeyError(tap)
        stored_TH = self._tensors.get_slice(f"tap_{tap}")[self._span]
        if self._layout.tap_format not in PACKED:
            return unpack(stored_TH, None)
        return unpack(stored_TH, self._tensors.get_slice(f"tap_{tap}_scale")[self._span])

    def __iter__(self) -> Iterator[int]:
        return iter(self._layout.taps)

    def __len__(self) -> int:
        return len(self._layout.taps)


class FeatureStore:
    """Reader of a finished store; conversations are ordered by id, whatever the layout of the shards.

    Attributes: folder, manifest, taps, conversation_ids, lengths (tokens of each), tokens, supervised_tokens. Any
    number of processes may read one store: tensors are memory-mapped.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: Sequence[Shard]) -> None:
        self.folder, self.manifest = folder, manifest
        self.taps: tuple[int, ...] = tuple(manifest["taps"])
        places: list[tuple[Entry, str, int]] = []
        for shard in shards:
            start = 0
            for entry in shard.entries:
                places.append((entry, shard.file, start))
                start += entry.length
        self._places = sorted(places, key=lambda place: place[0].id)
        self.conversation_ids = [entry.id for entry, _, _ in self._places]
        self.lengths = [entry.length for entry, _, _ in self._places]
        self.tokens = sum(self.lengths)
        self.supervised_tokens = sum(entry.supervised for entry, _, _ in self._places)
        self._open_files: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: str | Path, *, checksums: bool = True) -> FeatureStore:
        """Open a store after verifying that its manifest is complete and every shard is there, whole and unaltered.

        `checksums=False` leaves out the hash of each shard (one read of the whole store) and checks sizes alone: for
        the other processes of a run whose first process has verified. Raises HeadwayError naming the file at fault.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if not manifest["complete"]:
            raise HeadwayError(
                f"{folder}: the collection did not finish; run data_prep/collect.py again with this --out"
            )
        shards = finished_shards(folder, checksums=checksums)
        refuse_unlisted(folder, manifest, shards)
        entries_by_id(folder, shards)
        if not (folder / COUNTS).is_file():
            raise HeadwayError(f"{folder / COUNTS}: missing; collect again")
        if sha256_file(folder / COUNTS) != manifest["supervised_counts_sha256"]:
            raise HeadwayError(f"{folder / COUNTS}: checksum differs from the manifest's; collect again")
        return cls(folder, manifest, shards)

    @cached_property
    def layout(self) -> Layout:
        """What the shards keep of a token."""
        return Layout.of(self.manifest)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[StoredConversation]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> StoredConversation:
        """Conversation `index` in the order of ids: ids, turn, top1, top-k ids int64 [T] or [T, K]; lse and top-k logits
        float32; the last state [T, H] in the store's dtype, taps as StoredTaps."""
        entry, file, start = self._places[index]
        if file not in self._open_files:
            self._open_files[file] = safe_open(self.folder / file, "pt")
        tensors, span = self._open_files[file], slice(start, start + entry.length)
        kept = bool(self.layout.top_k)
        return StoredConversation(
            id=entry.id,
            ids_T=tensors.get_slice("ids")[span].long(),
            turn_T=tensors.get_slice("turn")[span].long(),
            last_TH=tensors.get_slice("last")[span],
            taps=StoredTaps(tensors, span, self.layout),
            top1_T=tensors.get_slice("top1")[span].long(),
            lse_T=tensors.get_slice("lse")[span],
            top_k_ids_TK=tensors.get_slice("top_k_ids")[span].long() if kept else None,
            top_k_logits_TK=tensors.get_slice("top_k_logits")[span] if kept else None,
        )

    def conversations_by_hash(self) -> list[list[int]]:
        """Rows of each conversation, in the order of the SHA-256 of its id: what is held out are the first ones. It has
        several rows where the chat template rewrites earlier turns; they belong on the same side of a split."""
        rows: dict[str, list[int]] = {}
        first_of: dict[tuple[str, str], str] = {}
        for row, (entry, _, _) in enumerate(self._places):  # sorted by id, so ID comes before ID#2
            first = first_of.get((entry.sha256, entry.id.rpartition("#")[0]), entry.id)
            first_of.setdefault((entry.sha256, first), first)
            rows.setdefault(first, []).append(row)
        return [rows[first] for first in sorted(rows, key=lambda each: hashlib.sha256(each.encode()).hexdigest())]

    def supervised_counts(self) -> torch.Tensor:
        """[V] int64: how often each token id is supervised in this store."""
        with safe_open(self.folder / COUNTS, "pt") as tensors:
            return tensors.get_tensor("counts")


def describe(folder: Path) -> str:
    """What a store, finished or not, says that it holds, in lines; no checksum of a shard is computed."""
    manifest, shards = read_manifest(folder), finished_shards(folder, checksums=False)
    layout, target = Layout.of(manifest), manifest["target"]
    entries = entries_by_id(folder, shards).values()
    tokens, supervised = sum(entry.length for entry in entries), sum(entry.supervised for entry in entries)
    written = sum(path.stat().st_size for path in folder.iterdir())
    logits = f"the {layout.top_k} largest logits and their log-sum-exp" if layout.top_k else "top-1 and log-sum-exp"
    lines = {
        "state": "complete" if manifest["complete"] else "not finished; run data_prep/collect.py again with this --out",
        "target": f"{target['name']} ({target['fingerprint'][:12]}) in {target['dtype']}",
        "made of": f"{manifest['conversations']} ({manifest['conversations_sha256'][:12]})",
        "holds": f"{len(entries):,} conversations, {tokens:,} tokens, {supervised:,} supervised"
        + (f" ({supervised / tokens:.1%})" if tokens else ""),
        "states": f"last in {layout.dtype}; taps {_list(layout.taps)} ({manifest['tap_convention']}) in {layout.tap_format}",
        "teacher": logits,
        "a token": f"{layout.bytes_per_token():,} bytes: "
        + ", ".join(f"{part} {count:,}" for part, count in layout.bytes_by_part().items()),
        "on disk": f"{written:,} bytes in {len(shards):,} shards"
        + (f", {written / tokens:,.1f} a token" if tokens else ""),
    }
    return "\n".join([f"{folder}", *(f"  {name:8}  {said}" for name, said in lines.items())])


def _list(taps: Sequence[int]) -> str:
    return ",".join(map(str, taps)) or "none"


def verify(folder: Path) -> str:
    """Compare every file of a finished store with its checksum; says what was compared.

    Prints a line for each damaged shard. Raises HeadwayError when there is one, or when the store is not what its manifest
    says.
    """
    read_manifest(folder)  # not the folder of a store: said before a bar appears
    faults: list[str] = []
    paths = sidecars(folder)
    for path in track(paths, description="checksums", transient=True):
        try:
            read_shard(path, checksums=True)
        except HeadwayError as error:
            faults.append(str(error))
    if len(faults) > 1:
        print("\n".join(faults))
        raise HeadwayError(f"{folder}: {len(faults)} of {len(paths)} shards are damaged, as listed; collect them again")
    if faults:
        raise HeadwayError(faults[0])
    store = FeatureStore.open(folder, checksums=False)
    return f"{folder}: whole; {len(paths):,} shards with {len(store):,} conversations, {COUNTS} and {MANIFEST} are as written"


def main() -> None:
    """Parse the command line, look at a store."""
    parser = ArgumentParser(description="Look at a feature store.", exit_on_error=False)
    commands = parser.add_subcommands(required=True)
    for name, said in (("info", "print what it holds"), ("verify", "compare every file with its checksum")):
        command = ArgumentParser(exit_on_error=False)
        command.add_argument("folder", type=Path, help="of the feature store")
        commands.add_subcommand(name, command, help=said)
    chosen = parse_arguments(parser)
    print(describe(chosen.info.folder) if chosen.subcommand == "info" else verify(chosen.verify.folder))


if __name__ == "__main__":
    run_script(main)
