"""Grow a Medusa head's candidate tree from its accuracies on held-out text, and save it beside the head.

    python eval/grow_tree.py --head artifacts/demo/medusa --size 24
    python eval/measure.py --head medusa-tree:artifacts/demo/medusa

Held out are the conversations of the feature store that the head's training left out. Shapes: P positions, K heads,
R ranks, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from data_prep.store import MANIFEST as STORE_MANIFEST
from data_prep.store import FeatureStore, StoredConversation
from eval.drafters.medusa import TREE
from eval.growth import accepted_length, conditional_accuracies, grow, measured_shares
from eval.tree import TreeShape
from heads import load_head
from heads.checkpoint import MANIFEST
from heads.errors import HeadwayError, atomic_write_text, run_script, sha256_file
from heads.medusa import MedusaHead, pack, served_labels
from heads.target import auto_device

ROWS = 512  # positions of which logits are held at a time


@dataclass(frozen=True)
class Options:
    """What to grow, from what.

    Args:
        head: folder of a Medusa head; the tree is saved in it
        size: nodes beside the root, such as 8 to 64; large trees pay only where a pass over many tokens is cheap
        ranks: candidates of each head that are considered
        features: feature store with held-out conversations (default: the one the head was trained on)
        held_out: conversations held out of the training (default: as in the head's recipe)
        device: auto is CUDA where there is one
    """

    head: Path
    size: int = 24
    ranks: int = 16
    features: Path | None = None
    held_out: int | None = None
    device: str = "auto"


def measure_ranks(head: MedusaHead, conversations: Iterable[StoredConversation], ranks: int) -> Tensor:
    """[P, K] int64: the rank each head gives the text's token at every served position; R: none of the first R.

    -1 where the assistant's turn ends before that token.
    """
    device, target_ids_D = head.lm_head.weight.device, head.target_ids()
    measured = [torch.empty(0, head.config.num_heads, dtype=torch.int64)]
    for stored in conversations:
        last_PH, next_P, segment_P = pack(stored.last_TH, stored.ids_T, stored.turn_T)
        labels_PK = served_labels(next_P, segment_P, head.config.num_heads)
        served_P = labels_PK[:, 0] >= 0
        rows = zip(last_PH[served_P].split(ROWS), labels_PK[served_P].split(ROWS), strict=True)
        measured.extend(_ranks(head, target_ids_D, last.to(device), labels.to(device), ranks) for last, labels in rows)
    return torch.cat(measured)


@torch.inference_mode()
def _ranks(head: MedusaHead, target_ids_D: Tensor, last_PH: Tensor, labels_PK: Tensor, ranks: int) -> Tensor:
    logits_PKD = head.draft_logits(last_PH.to(head.lm_head.weight.dtype))
    found_PKR = target_ids_D[logits_PKD.topk(min(ranks, logits_PKD.shape[-1])).indices] == labels_PK[..., None]
    rank_PK = torch.where(found_PKR.any(-1), found_PKR.long().argmax(-1), ranks)
    return torch.where(labels_PK < 0, -1, rank_PK).cpu()


def grow_tree(options: Options) -> dict[str, Any]:
    """Measure, grow and save; returns what was saved.

    Raises HeadwayError for a head of another kind, a store of another target, and a store with nothing held out.
    """
    head = load_head(options.head, device=auto_device(options.device), dtype=torch.float32)
    if not isinstance(head, MedusaHead):
        raise HeadwayError(f"{options.head}: a head of kind '{head.config.kind}'; trees are grown for Medusa heads")
    if head.config.hydra:
        raise HeadwayError(
            f"{options.head}: Hydra heads draft a chain; trees are grown for heads that share candidates"
        )
    if options.ranks < 1:
        raise HeadwayError(f"ranks {options.ranks}: give at least 1")
    data = head.manifest.get("recipe", {}).get("data", {})
    folder = options.features or (Path(data["features"]) if "features" in data else None)
    held_out = options.held_out if options.held_out is not None else data.get("held_out")
    if folder is None or held_out is None:
        raise HeadwayError(f"{options.head / MANIFEST}: names no recipe; give --features and --held_out")
    rows = held_out_rows(_open(folder, head), held_out)
    halves = [measure_ranks(head, half, options.ranks) for half in (rows[::2], rows[1::2])]
    ranks_PK = torch.cat(halves)
    accuracy_KR = conditional_accuracies(ranks_PK, options.ranks)
    shape = grow(measured_shares(ranks_PK, options.ranks), options.size)
    chain = TreeShape(tuple((0,) * depth for depth in range(1, head.config.num_heads + 1)))
    grown = {
        "paths": [list(path) for path in shape.paths],
        "accepted": _accepted_elsewhere(halves, options),
        "accepted_by_chain": accepted_length(ranks_PK, chain),
        "conditional_accuracies": [[round(share, 6) for share in row] for row in accuracy_KR.tolist()],
        "positions": len(ranks_PK),
        "conversations": held_out,
        "head_manifest_sha256": sha256_file(options.head / MANIFEST),
        "features_manifest_sha256": sha256_file(folder / STORE_MANIFEST),
    }
    atomic_write_text(options.head / TREE, json.dumps(grown) + "\n")
    return grown


def _accepted_elsewhere(halves: list[Tensor], options: Options) -> float:
    """Mean accepted drafts where a tree grown on one half of the conversations meets the other: not flattered."""
    total = 0.0
    for mine, other in (halves, halves[::-1]):
        total += len(other) * accepted_length(other, grow(measured_shares(mine, options.ranks), options.size))
    return total / sum(map(len, halves))


def _open(folder: Path, head: MedusaHead) -> FeatureStore:
    store = FeatureStore.open(folder)
    trained, stored = (of.get("target", {}).get("fingerprint") for of in (head.manifest, store.manifest))
    if trained != stored:
        raise HeadwayError(
            f"{folder}: states of target {str(stored)[:16]}, the head is for {str(trained)[:16]}; "
            "give --features a store of the head's target"
        )
    return store


def held_out_rows(store: FeatureStore, count: int) -> list[StoredConversation]:
    """The `count` conversations whose ids have the smallest SHA-256: those that training leaves out."""
    conversations = store.conversations_by_hash()
    if not 2 <= count <= len(conversations):
        raise HeadwayError(
            f"{store.folder}: {count} conversations held out of {len(conversations)}; give --held_out a number in it"
        )
    return [store[row] for rows in conversations[:count] for row in rows]


def main() -> None:
    """Parse the command line, grow, say what came out."""
    parser = ArgumentParser(description="Grow a Medusa head's candidate tree.", exit_on_error=False)
    parser.add_class_arguments(Options)
    try:
        options = Options(**parser.parse_args().as_dict())
    except ArgumentError as error:
        raise HeadwayError(f"{error}; see --help") from error
    grown = grow_tree(options)
    print(
        f"{options.head / TREE}: {len(grown['paths'])} nodes, {grown['accepted']:.3f} drafts accepted a round at "
        f"{grown['positions']:,} held-out positions (the chain: {grown['accepted_by_chain']:.3f})"
    )


if __name__ == "__main__":
    run_script(main)
