"""Grow a head's candidate tree from its accuracies on held-out text, and save it beside the head.

    python eval/grow_tree.py --head artifacts/demo/medusa
    python eval/measure.py --head medusa-tree:artifacts/demo/medusa      # of an EAGLE head: eagle-static:DIR

Held out are the conversations of the feature store that the head's training left out. Of the sizes tried the tree has the
one that decodes fastest on this device: tau, from the replay of all held-out text, over what a round costs, from decoding
some of it. Shapes: P positions, S steps (heads), R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from data_prep.store import MANIFEST as STORE_MANIFEST
from data_prep.store import FeatureStore, StoredConversation
from eval.drafters.medusa import TREE
from eval.growth import accepted_length, conditional_accuracies, grow, measured_shares
from eval.replay import chain as chain_shape
from eval.replay import text_ranks
from eval.replay_steps import most_steps
from eval.tree_size import PROMPTS, SIZES, TOKENS, Tried, round_cost, try_sizes
from heads import load_head
from heads.checkpoint import MANIFEST, Head
from heads.command_line import parse_arguments
from heads.eagle import EagleHead
from heads.errors import HeadwayError, atomic_write_text, run_script, sha256_file
from heads.medusa import MedusaHead
from heads.target import Target, TargetEnds, auto_device, auto_dtype

MOST = 1024  # nodes of a tree: each is a row of every verification pass


@dataclass(frozen=True)
class Options:
    """What to grow, from what.

    Args:
        head: folder of a Medusa or EAGLE head; the tree is saved in it
        target: name, folder or Hub id (default: as in the head's manifest)
        size: nodes beside the root, such as 8 to 64; null tries some and takes the fastest, greedy and at batch 1
        depth: of an EAGLE head's tree; Medusa heads go as deep as there are heads
        ranks: candidates of each node that are considered
        features: feature store with held-out conversations (default: the one the head was trained on)
        held_out: conversations held out of the training (default: as in the head's recipe)
        dtype: of target and head while sizes are tried; auto is bfloat16 where the device is fast at it, else float32
        device: auto is CUDA where there is one
    """

    head: Path
    target: str | None = None
    size: int | None = None
    depth: int = 4
    ranks: int = 16
    features: Path | None = None
    held_out: int | None = None
    dtype: str = "auto"
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
    for option in ("ranks", "depth"):
        if getattr(options, option) < 1:
            raise HeadwayError(f"{option} {getattr(options, option)}: give at least 1")
    if options.size is not None and not 1 <= options.size <= MOST:
        raise HeadwayError(f"size {options.size}: give 1 to {MOST} nodes, such as 8 to 64, or none to try some")
    device = auto_device(options.device)
    auto_dtype(options.dtype, device)
    head = load_head(options.head, device=device, dtype=torch.float32)
    if isinstance(head, MedusaHead) and head.config.hydra:
        raise HeadwayError(
            f"{options.head}: Hydra heads draft a chain; trees are grown for heads that share candidates"
        )
    depth = most_steps(head) or options.depth
    data = head.manifest.get("recipe", {}).get("data", {})
    folder = options.features or (Path(data["features"]) if data.get("features") else None)
    held_out = options.held_out if options.held_out is not None else data.get("held_out")
    if folder is None or held_out is None:
        raise HeadwayError(f"{options.head / MANIFEST}: names no feature store; give --features and --held_out")
    conversations = held_out_conversations(_open(folder, head), held_out)
    name = options.target or head.manifest["target"]["name"]
    ends = TargetEnds.load(name, "float32", str(device))
    if ends.fingerprint != head.manifest["target"]["fingerprint"]:
        raise HeadwayError(f"{options.head}: trained for another target than '{name}'; give --target the one it is for")
    halves = [
        measure_ranks(head, ends, chain.from_iterable(half), options.ranks, depth)
        for half in (conversations[::2], conversations[1::2])
    ]
    ranks_PS = torch.cat(halves)
    accuracy_SR = conditional_accuracies(ranks_PS, options.ranks)
    shares = measured_shares(ranks_PS, options.ranks)
    tried = _tried(options, name, halves, conversations) if options.size is None else []
    size = max(tried, key=lambda each: each.speedup).size if options.size is None else options.size
    shape = grow(shares, size)
    grown = {
        "paths": [list(path) for path in shape.paths],
        "accepted": _accepted_elsewhere(halves, options.ranks, size),
        "sizes_tried": [asdict(each) | {"speedup": each.speedup} for each in tried],
        "accepted_by_chain": accepted_length(ranks_PS, chain_shape(depth)),
        "conditional_accuracies": [[round(share, 6) for share in row] for row in accuracy_SR.tolist()],
        "positions": len(ranks_PS),
        "conversations": held_out,
        "head_manifest_sha256": sha256_file(options.head / MANIFEST),
        "features_manifest_sha256": sha256_file(folder / STORE_MANIFEST),
    }
    atomic_write_text(options.head / TREE, json.dumps(grown) + "\n")
    return grown


def _tried(
    options: Options, name: str, halves: list[Tensor], conversations: list[list[StoredConversation]]
) -> list[Tried]:
    """Trees of some sizes decoded on the device, each printed when it is done, behind the chain that they should beat."""
    target = Target.load(name, options.dtype, options.device)
    head = load_head(options.head, device=target.device, dtype=target.dtype)
    assert isinstance(head, MedusaHead | EagleHead)  # no other could be replayed
    shares = measured_shares(torch.cat(halves), options.ranks)
    prompts = [prompt_of(rows[0]) for rows in conversations[:PROMPTS]]
    print(f"trying trees of {SIZES[0]} nodes and more, {len(prompts)} prompts x {TOKENS} tokens each", flush=True)
    line = chain_shape(halves[0].shape[1])
    cost = round_cost(head, target, line, prompts)
    print(f"the chain: {Tried(line.max_depth, accepted_length(torch.cat(halves), line), cost)}", flush=True)
    tried = []
    for each in try_sizes(
        (grow(shares, size) for size in SIZES),
        lambda nodes: _accepted_elsewhere(halves, options.ranks, nodes),
        lambda shape: round_cost(head, target, shape, prompts),
    ):
        print(f"a tree: {each}", flush=True)
        tried.append(each)
    return tried


def prompt_of(stored: StoredConversation) -> list[int]:
    """What stands before the first answer."""
    return stored.ids_T[: int((stored.turn_T > 0).int().argmax())].tolist()


def _accepted_elsewhere(halves: list[Tensor], ranks: int, size: int) -> float:
    """Mean accepted drafts where a tree grown on one half of the conversations meets the other: not flattered."""
    total = 0.0
    for mine, other in (halves, halves[::-1]):
        total += len(other) * accepted_length(other, grow(measured_shares(mine, ranks), size))
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


def held_out_conversations(store: FeatureStore, count: int) -> list[list[StoredConversation]]:
    """The rows of the `count` conversations whose ids have the smallest SHA-256: those that training leaves out."""
    conversations = store.conversations_by_hash()
    if not 2 <= count <= len(conversations):
        raise HeadwayError(
            f"{store.folder}: {count} conversations held out of {len(conversations)}; give --held_out a number in it"
        )
    return [[store[row] for row in rows] for rows in conversations[:count]]


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
