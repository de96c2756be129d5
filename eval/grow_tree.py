"""Grow a head's candidate tree from its accuracies on held-out text, and save it beside the head.

    python eval/grow_tree.py --head artifacts/demo/medusa --size 24
    python eval/measure.py --head medusa-tree:artifacts/demo/medusa      # of an EAGLE head: eagle-static:DIR

Held out are the conversations of the feature store that the head's training left out. Shapes: P positions, S steps (heads),
R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from data_prep.store import MANIFEST as STORE_MANIFEST
from data_prep.store import FeatureStore, StoredConversation
from eval.drafters.medusa import TREE
from eval.growth import accepted_length, conditional_accuracies, grow, measured_shares
from eval.replay import chain, text_ranks
from eval.replay_steps import most_steps
from heads import load_head
from heads.checkpoint import MANIFEST, Head
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, atomic_write_text, run_script, sha256_file
from heads.medusa import MedusaHead
from heads.target import TargetEnds, auto_device


@dataclass(frozen=True)
class Options:
    """What to grow, from what.

    Args:
        head: folder of a Medusa or EAGLE head; the tree is saved in it
        target: name, folder or Hub id (default: as in the head's manifest)
        size: nodes beside the root, such as 8 to 64; large trees pay only where a pass over many tokens is cheap
        depth: of an EAGLE head's tree; Medusa heads go as deep as there are heads
        ranks: candidates of each node that are considered
        features: feature store with held-out conversations (default: the one the head was trained on)
        held_out: conversations held out of the training (default: as in the head's recipe)
        device: auto is CUDA where there is one
    """

    head: Path
    target: str | None = None
    size: int = 24
    depth: int = 4
    ranks: int = 16
    features: Path | None = None
    held_out: int | None = None
    device: str = "auto"


def measure_ranks(
    head: Head, ends: TargetEnds, conversations: Iterable[StoredConversation], ranks: int, depth: int
) -> Tensor:
    """[P, S] int64: the rank each step's candidates give the text's token at every served position; R: none of the first R.

    -1 where the assistant's turn ends before that token.
    """
    measured = [torch.empty(0, depth, dtype=torch.int64)]
    for stored in conversations:
        ranks_PS = text_ranks(head, ends, stored, depth).ranks_PS
        measured.append(ranks_PS[ranks_PS[:, 0] >= 0].clamp(max=ranks))
    return torch.cat(measured)


def grow_tree(options: Options) -> dict[str, Any]:
    """Measure, grow and save; returns what was saved.

    Raises HeadwayError for a head of another kind, a store of another target, and a store with nothing held out.
    """
    head = load_head(options.head, device=auto_device(options.device), dtype=torch.float32)
    if isinstance(head, MedusaHead) and head.config.hydra:
        raise HeadwayError(
            f"{options.head}: Hydra heads draft a chain; trees are grown for heads that share candidates"
        )
    for name in ("ranks", "depth"):
        if getattr(options, name) < 1:
            raise HeadwayError(f"{name} {getattr(options, name)}: give at least 1")
    depth = most_steps(head) or options.depth
    data = head.manifest.get("recipe", {}).get("data", {})
    folder = options.features or (Path(data["features"]) if data.get("features") else None)
    held_out = options.held_out if options.held_out is not None else data.get("held_out")
    if folder is None or held_out is None:
        raise HeadwayError(f"{options.head / MANIFEST}: names no feature store; give --features and --held_out")
    rows = held_out_rows(_open(folder, head), held_out)
    name = options.target or head.manifest["target"]["name"]
    ends = TargetEnds.load(name, "float32", str(auto_device(options.device)))
    if ends.fingerprint != head.manifest["target"]["fingerprint"]:
        raise HeadwayError(f"{options.head}: trained for another target than '{name}'; give --target the one it is for")
    halves = [measure_ranks(head, ends, half, options.ranks, depth) for half in (rows[::2], rows[1::2])]
    ranks_PS = torch.cat(halves)
    accuracy_SR = conditional_accuracies(ranks_PS, options.ranks)
    shape = grow(measured_shares(ranks_PS, options.ranks), options.size)
    grown = {
        "paths": [list(path) for path in shape.paths],
        "accepted": _accepted_elsewhere(halves, options),
        "accepted_by_chain": accepted_length(ranks_PS, chain(depth)),
        "conditional_accuracies": [[round(share, 6) for share in row] for row in accuracy_SR.tolist()],
        "positions": len(ranks_PS),
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


def _open(folder: Path, head: Head) -> FeatureStore:
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
    parser = ArgumentParser(description="Grow a head's candidate tree.", exit_on_error=False)
    parser.add_class_arguments(Options)
    options = Options(**parse_arguments(parser).as_dict())
    grown = grow_tree(options)
    print(
        f"{options.head / TREE}: {len(grown['paths'])} nodes, {grown['accepted']:.3f} drafts accepted a round at "
        f"{grown['positions']:,} held-out positions (the chain: {grown['accepted_by_chain']:.3f})"
    )


if __name__ == "__main__":
    run_script(main)
