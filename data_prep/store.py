"""The feature store: what the frozen target computed over conversations, on disk, for training heads offline.

A store is a folder. Each shard is `NAME.safetensors` with a sidecar `NAME.json` that is written after it, so a shard is
finished exactly when its sidecar is there; `supervised_counts.safetensors` and the completed `manifest.json` come last.
Tensors of a shard of n tokens and R conversations:

    ids int32 [n], turn int16 [n] (0 = not supervised, k = written by the target in its k-th turn), offsets int64 [R+1],
    last [n, H] (state after the final norm) and tap_<i> [n, H] (residual stream entering layer i) in the store's dtype,
    top1 int32 [n] (-1 where the next token is not supervised), lse float32 [n] (0 there).

top1 and lse are the argmax and the log-sum-exp of the logits that the STORED last state gives, so that logits
recomputed from it are normalised by lse. Shapes: T positions of one conversation, n tokens of a shard, H hidden,
V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from heads.errors import HeadwayError, atomic_write_text, sha256_file

SCHEMA = 1
MANIFEST, COUNTS, PREFIX = "manifest.json", "supervised_counts.safetensors", "features-"
TAP_CONVENTION = "entering layer i"
IDENTITY = ("schema", "target.fingerprint", "target.dtype", "dtype", "taps", "max_length")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Entry:
    """A conversation as sidecars list it: its id, the hash of its content, tokens, supervised tokens."""

    id: str
    sha256: str
    length: int
    supervised: int


@dataclass(frozen=True)
class Shard:
    """A finished shard as the manifest lists it, and its conversations in the order they lie in the file."""

    file: str
    sha256: str
    bytes: int
    sidecar_sha256: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class StoredConversation:
    """What the store holds of one conversation, on the CPU; the states are views of the mapped file."""

    id: str
    ids_T: torch.Tensor
    turn_T: torch.Tensor
    last_TH: torch.Tensor
    taps: dict[int, torch.Tensor]
    top1_T: torch.Tensor
    lse_T: torch.Tensor


def bytes_per_token(hidden_size: int, taps: int, dtype: str) -> int:
    """Bytes a token takes in a shard: its states, and 14 for ids, turn, top1 and lse."""
    return (taps + 1) * hidden_size * DTYPES[dtype].itemsize + 14


def write_shard(folder: Path, name: str, entries: Sequence[Entry], rows: Sequence[StoredConversation]) -> None:
    """Write shard `name` (no suffix), then its sidecar; a kill at any moment leaves a temporary file or a whole one."""
    lengths = torch.tensor([0] + [len(row.ids_T) for row in rows])
    tensors = {
        "ids": torch.cat([row.ids_T for row in rows]).to(torch.int32),
        "turn": torch.cat([row.turn_T for row in rows]).to(torch.int16),
        "offsets": lengths.cumsum(0),
        "last": torch.cat([row.last_TH for row in rows]),
        "top1": torch.cat([row.top1_T for row in rows]).to(torch.int32),
        "lse": torch.cat([row.lse_T for row in rows]),
    }
    for tap in rows[0].taps:
        tensors[f"tap_{tap}"] = torch.cat([row.taps[tap] for row in rows])
    file = f"{name}.safetensors"
    digest, size = _write_tensors(folder / file, tensors)
    sidecar = {"file": file, "sha256": digest, "bytes": size, "conversations": [asdict(entry) for entry in entries]}
    atomic_write_text(folder / f"{name}.json", json.dumps(sidecar, indent=1) + "\n")


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[str, int]:
    """Atomic write; returns SHA-256 and size. Through bytes: save_file makes files that only their owner can read."""
    content = save(tensors)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be written ({error.strerror}); make room and run again") from error
    return hashlib.sha256(content).hexdigest(), len(content)


def sweep(folder: Path) -> list[str]:
    """Remove what a killed collection left half written (temporary files, shards without sidecar); their names."""
    left = [*folder.glob(".*.tmp")]
    left += [path for path in folder.glob(f"{PREFIX}*.safetensors") if not path.with_suffix(".json").exists()]
    for path in left:
        path.unlink()
    return sorted(path.name for path in left)


def finished_shards(folder: Path, *, checksums: bool) -> list[Shard]:
    """Shards with a sidecar, by name. Raises HeadwayError for one whose file is missing, cut short or altered."""
    return [_read_shard(path, checksums) for path in sorted(folder.glob(f"{PREFIX}*.json"))]


def _read_shard(sidecar: Path, checksums: bool) -> Shard:
    file = sidecar.with_suffix(".safetensors")
    remedy = f"delete {file.name} and {sidecar.name} and collect again"
    content = read_json(sidecar, remedy)
    try:
        entries = tuple(Entry(**entry) for entry in content["conversations"])
        shard = Shard(content["file"], content["sha256"], content["bytes"], sha256_file(sidecar), entries)
    except (KeyError, TypeError) as error:
        raise HeadwayError(f"{sidecar}: not a shard's sidecar ({error}); {remedy}") from error
    if shard.file != file.name or not file.is_file():
        raise HeadwayError(f"{file}: the shard of {sidecar.name} is missing; {remedy}")
    if file.stat().st_size != shard.bytes:
        raise HeadwayError(f"{file}: {file.stat().st_size} bytes where {shard.bytes} were written; {remedy}")
    if checksums and sha256_file(file) != shard.sha256:
        raise HeadwayError(f"{file}: checksum differs from the one written with it; {remedy}")
    return shard


def entries_by_id(folder: Path, shards: Iterable[Shard]) -> dict[str, Entry]:
    """Finished conversations by id. Raises HeadwayError for one that lies in two shards."""
    found: dict[str, Entry] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.id in found:
                raise HeadwayError(
                    f"{folder / shard.file}: conversation {entry.id} lies in another shard too; "
                    "delete one of the two with its sidecar and collect again"
                )
            found[entry.id] = entry
    return found


def free_names(folder: Path, rank: int, ranks: int) -> Iterator[str]:
    """Names for a rank's next shards: the numbers not taken, ascending, so that a resumed run names them alike."""
    for number in itertools.count():
        name = f"{PREFIX}{rank:05d}-of-{ranks:05d}-{number:05d}"
        if not (folder / f"{name}.json").exists():
            yield name


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object from a file; HeadwayError with the remedy when it is missing or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadwayError(f"{path}: missing; {remedy}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise HeadwayError(f"{path}: not a JSON object; {remedy}")
    return content


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json with a checksum of its own content."""
    sealed = manifest | {"manifest_sha256": _seal(manifest)}
    atomic_write_text(folder / MANIFEST, json.dumps(sealed, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store, finished or not. Raises HeadwayError when missing, altered or of another schema."""
    path = folder / MANIFEST
    manifest = read_json(path, "give the folder of a feature store, or collect again into a new one")
    if manifest.get("kind") != "features":
        raise HeadwayError(f"{path}: not the manifest of a feature store; give the folder of one")
    seal = manifest.pop("manifest_sha256", None)
    if seal != _seal(manifest):
        raise HeadwayError(f"{path}: its content does not fit its checksum; collect again into a new folder")
    if manifest.get("schema") != SCHEMA:
        raise HeadwayError(f"{path}: schema {manifest.get('schema')}, this version reads {SCHEMA}; collect again")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def refuse_other(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise HeadwayError naming both values when the store in `folder` was made with something else than this run."""
    for key in IDENTITY:
        first, _, second = key.partition(".")
        was, now = (manifest[first][second] if second else manifest[first] for manifest in (old, new))
        if was != now:
            raise HeadwayError(
                f"{folder}: was collected with {key} {was}, this run has {now}; give a new --out or delete the folder"
            )


def finish(folder: Path, manifest: dict[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
    """Count the supervised tokens, write the counts and the completed manifest; returns the manifest."""
    counts_V = torch.zeros(manifest["vocab_size"], dtype=torch.int64)
    for shard in shards:
        with safe_open(folder / shard.file, "pt") as tensors:
            ids_n, turn_n = tensors.get_tensor("ids"), tensors.get_tensor("turn")
            counts_V += torch.bincount(ids_n[turn_n > 0], minlength=len(counts_V))
    digest, _ = _write_tensors(folder / COUNTS, {"counts": counts_V})
    entries = entries_by_id(folder, shards).values()
    totals = {
        "conversations": len(entries),
        "tokens": sum(entry.length for entry in entries),
        "supervised_tokens": sum(entry.supervised for entry in entries),
        "bytes": sum(shard.bytes for shard in shards),
    }
    listed = [
        {"file": shard.file, "sha256": shard.sha256, "bytes": shard.bytes, "sidecar_sha256": shard.sidecar_sha256}
        for shard in shards
    ]
    done = manifest | {"complete": True, "totals": totals, "supervised_counts_sha256": digest, "shards": listed}
    write_manifest(folder, done)
    return done


class FeatureStore:
    """Reader of a finished store; conversations are ordered by id, whatever the layout of the shards.

    Attributes: folder, manifest, conversation_ids, lengths (tokens of each), tokens, supervised_tokens. Any number of
    processes may read one store: tensors are memory-mapped.
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
        listed = {shard["file"]: shard for shard in manifest["shards"]}
        for shard in shards:
            known = listed.pop(shard.file, None)
            made = {"sha256": shard.sha256, "bytes": shard.bytes, "sidecar_sha256": shard.sidecar_sha256}
            if known is None or any(known[key] != value for key, value in made.items()):
                raise HeadwayError(f"{folder / shard.file}: not the shard the manifest lists; collect again")
        if listed:
            raise HeadwayError(f"{folder / min(listed)}: listed in the manifest but missing; collect again")
        if not (folder / COUNTS).is_file():
            raise HeadwayError(f"{folder / COUNTS}: missing; collect again")
        if sha256_file(folder / COUNTS) != manifest["supervised_counts_sha256"]:
            raise HeadwayError(f"{folder / COUNTS}: checksum differs from the manifest's; collect again")
        return cls(folder, manifest, shards)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[StoredConversation]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> StoredConversation:
        """Conversation `index` in the order of ids: ids, turn, top1 int64 [T]; lse float32 [T]; states [T, H]."""
        entry, file, start = self._places[index]
        if file not in self._open_files:
            self._open_files[file] = safe_open(self.folder / file, "pt")
        tensors, span = self._open_files[file], slice(start, start + entry.length)
        return StoredConversation(
            id=entry.id,
            ids_T=tensors.get_slice("ids")[span].long(),
            turn_T=tensors.get_slice("turn")[span].long(),
            last_TH=tensors.get_slice("last")[span],
            taps={tap: tensors.get_slice(f"tap_{tap}")[span] for tap in self.taps},
            top1_T=tensors.get_slice("top1")[span].long(),
            lse_T=tensors.get_slice("lse")[span],
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
