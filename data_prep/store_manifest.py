"""The manifest of a feature store: what made it, of what, and once it is complete the shards that belong to it.

Shapes: n tokens of a shard, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from data_prep.sealed_json import read_json, unsealed, write_sealed
from data_prep.shards import Shard, entries_by_id, write_tensors
from heads.errors import HeadwayError

SCHEMA = 2
MANIFEST, COUNTS = "manifest.json", "supervised_counts.safetensors"
TAP_CONVENTION = "entering layer i"
IDENTITY = (
    "schema",
    "target.fingerprint",
    "target.dtype",
    "dtype",
    "taps",
    "tap_format",
    "top_k_logits",
    "max_length",
)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json with a checksum of its own content."""
    write_sealed(folder / MANIFEST, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store, finished or not. Raises HeadwayError when missing, altered or of another schema."""
    path = folder / MANIFEST
    remedy = "collect again into a new folder"
    manifest = read_json(path, f"give the folder of a feature store, or {remedy}")
    if manifest.get("kind") != "features":
        raise HeadwayError(f"{path}: not the manifest of a feature store; give the folder of one")
    if manifest.get("schema") != SCHEMA:
        raise HeadwayError(f"{path}: schema {manifest.get('schema')}, this version reads {SCHEMA}; {remedy}")
    return unsealed(path, manifest, remedy)


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
    entries = entries_by_id(folder, shards).values()
    digest, _ = write_tensors(folder / COUNTS, {"counts": count_supervised(folder, shards, manifest["vocab_size"])})
    totals = {
        "conversations": len(entries),
        "tokens": sum(entry.length for entry in entries),
        "supervised_tokens": sum(entry.supervised for entry in entries),
        "bytes": sum(shard.bytes for shard in shards),
    }
    listed = [shard.as_listed() for shard in shards]
    done = manifest | {"complete": True, "totals": totals, "supervised_counts_sha256": digest, "shards": listed}
    write_manifest(folder, done)
    return done


def count_supervised(folder: Path, shards: Sequence[Shard], vocab_size: int) -> torch.Tensor:
    """[V] int64: how often each token id is supervised in these shards."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in shards:
        with safe_open(folder / shard.file, "pt") as tensors:
            ids_n, turn_n = tensors.get_tensor("ids"), tensors.get_tensor("turn")
            counts_V += torch.bincount(ids_n[turn_n > 0], minlength=len(counts_V))
    return counts_V


def refuse_unlisted(folder: Path, manifest: dict[str, Any], shards: Sequence[Shard]) -> None:
    """Raise HeadwayError unless `shards` are exactly those that a completed manifest lists."""
    listed = {shard["file"]: shard for shard in manifest["shards"]}
    for shard in shards:
        if listed.pop(shard.file, None) != shard.as_listed():
            raise HeadwayError(f"{folder / shard.file}: not the shard the manifest lists; collect again")
    if listed:
        raise HeadwayError(f"{folder / min(listed)}: listed in the manifest but missing; collect again")
