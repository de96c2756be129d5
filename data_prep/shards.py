"""Shards of a feature store: `NAME.safetensors` with a sidecar `NAME.json` that is written after it.

A shard is finished exactly when its sidecar is there. Tensors of one of n tokens and R conversations:

    ids int32 [n], turn int16 [n] (0 = not supervised, k = written by the target in its k-th turn), offsets int64 [R+1],
    last [n, H] (state after the final norm), tap_<i> [n, H] (residual stream entering layer i) and, of an 8-bit format,
    tap_<i>_scale bf16 [n, G] (packed_states.py), top1 int32 [n] (-1 where the next token is not supervised),
    lse float32 [n] (0 there) and, where asked for, top_k_ids int32 [n, K] (-1 there) and top_k_logits float32 [n, K]
    (0 there), the largest first.

top1, lse and top_k are of the logits that the STORED last state gives, so that logits recomputed from it are normalised by
lse, and exp(top_k_logits - lse) are probabilities. Shapes: T positions of one conversation, H hidden, K top-k logits.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from data_prep.packed_states import pack, state_bytes
from data_prep.sealed_json import read_json, unsealed, write_sealed
from heads.errors import HeadwayError, sha256_file

PREFIX = "features-"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MARKS = 14  # bytes of ids, turn, top1 and lse


@dataclass(frozen=True)
class Layout:
    """What a store keeps of a token: `dtype` is that of the last state, `top_k` 0 where no logits are kept."""

    hidden_size: int
    taps: tuple[int, ...]
    dtype: str
    tap_format: str
    top_k: int

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Layout:
        """The layout that a store's manifest states."""
        return cls(
            hidden_size=manifest["hidden_size"],
            taps=tuple(manifest["taps"]),
            dtype=manifest["dtype"],
            tap_format=manifest["tap_format"],
            top_k=manifest["top_k_logits"],
        )

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes a token takes in a shard, by what they hold."""
        parts = {
            "ids and marks": MARKS,
            "last state": self.hidden_size * DTYPES[self.dtype].itemsize,
            "taps": len(self.taps) * state_bytes(self.hidden_size, self.tap_format),
            "top-k logits": self.top_k * (torch.int32.itemsize + torch.float32.itemsize),
        }
        return {part: count for part, count in parts.items() if count}

    def bytes_per_token(self) -> int:
        """Bytes a token takes in a shard."""
        return sum(self.bytes_by_part().values())


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

    def as_listed(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {key: value for key, value in vars(self).items() if key != "entries"}


@dataclass(frozen=True)
class StoredConversation:
    """What is known of one conversation, on the CPU: states [T, H] in float32 or bfloat16, logits where they were kept."""

    id: str
    ids_T: torch.Tensor
    turn_T: torch.Tensor
    last_TH: torch.Tensor
    taps: Mapping[int, torch.Tensor]
    top1_T: torch.Tensor
    lse_T: torch.Tensor
    top_k_ids_TK: torch.Tensor | None = None
    top_k_logits_TK: torch.Tensor | None = None


def write_shard(
    folder: Path, name: str, layout: Layout, entries: Sequence[Entry], rows: Sequence[StoredConversation]
) -> None:
    """Write shard `name` (no suffix), then its sidecar; a kill at any moment leaves a temporary file or a whole one."""
    file = f"{name}.safetensors"
    digest, size = write_tensors(folder / file, _tensors(layout, rows))
    sidecar = {"file": file, "sha256": digest, "bytes": size, "conversations": [asdict(entry) for entry in entries]}
    write_sealed(folder / f"{name}.json", sidecar)


def _tensors(layout: Layout, rows: Sequence[StoredConversation]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0] + [len(row.ids_T) for row in rows])
    tensors = {
        "ids": torch.cat([row.ids_T for row in rows]).to(torch.int32),
        "turn": torch.cat([row.turn_T for row in rows]).to(torch.int16),
        "offsets": lengths.cumsum(0),
        "last": torch.cat([row.last_TH for row in rows]).to(DTYPES[layout.dtype]),
        "top1": torch.cat([row.top1_T for row in rows]).to(torch.int32),
        "lse": torch.cat([row.lse_T for row in rows]),
    }
    for tap in layout.taps:
        packed = [pack(row.taps[tap], layout.tap_format) for row in rows]
        tensors[f"tap_{tap}"] = torch.cat([stored for stored, _ in packed])
        scales = [scales_TG for _, scales_TG in packed if scales_TG is not None]
        if scales:
            tensors[f"tap_{tap}_scale"] = torch.cat(scales)
    if layout.top_k:
        kept = [(row.top_k_ids_TK, row.top_k_logits_TK) for row in rows]
        tensors["top_k_ids"] = torch.cat([ids for ids, _ in kept if ids is not None]).to(torch.int32)
        tensors["top_k_logits"] = torch.cat([logits for _, logits in kept if logits is not None])
    return tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[str, int]:
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


def sidecars(folder: Path) -> list[Path]:
    """The sidecars of finished shards, by name."""
    return sorted(folder.glob(f"{PREFIX}*.json"))


def finished_shards(folder: Path, *, checksums: bool) -> list[Shard]:
    """Shards with a sidecar, by name. Raises HeadwayError for one whose file is missing, cut short or altered."""
    return [read_shard(path, checksums=checksums) for path in sidecars(folder)]


def read_shard(sidecar: Path, *, checksums: bool) -> Shard:
    """What a sidecar says of its shard. Raises HeadwayError when either is missing, cut short or altered; without
    `checksums` the shard's size alone is looked at."""
    file = sidecar.with_suffix(".safetensors")
    remedy = f"delete {file.name} and {sidecar.name} and collect again"
    content = unsealed(sidecar, read_json(sidecar, remedy), remedy)
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
    """Finished conversations by id. Raises HeadwayError for one that lies in two shards, or twice in one."""
    found: dict[str, Entry] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.id in found:
                raise HeadwayError(
                    f"{folder / shard.file}: conversation {entry.id} is there twice, or in another shard too; "
                    "delete this one with its sidecar and collect again"
                )
            found[entry.id] = entry
    return found


def free_names(folder: Path, rank: int, ranks: int) -> Iterator[str]:
    """Names for a rank's next shards: the numbers not taken, ascending, so that a resumed run names them alike."""
    for number in itertools.count():
        name = f"{PREFIX}{rank:05d}-of-{ranks:05d}-{number:05d}"
        if not (folder / f"{name}.json").exists():
            yield name
