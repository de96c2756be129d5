"""Grow a head's candidate tree from its accuracies on held-out text, and save it beside the head.

    python eval/grow_tree.py --head artifacts/demo/medusa
    python eval/measure.py --head medusa-tree:artifacts/demo/medusa      # of an EAGLE head: eagle-static:DIR

Held out are the conversations of the feature store that the head's training left out. Of the sizes tried the tree has the
one that decodes fastest on this device: tau, from the replay of all held-out text, over what a round costs, from decoding
some of it. Shapes: P positions, S steps (heads), R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from rich.console import Console
from torch import Tensor

from data_prep.store import MANIFEST as STORE_MANIFEST
from data_prep.store import FeatureStore, StoredConversation
from eval.contenders import BASELINE, Contender, build, static_tree
from eval.decode import Settings
from eval.drafters.medusa import TREE
from eval.growth import accepted_length, conditional_accuracies, grow, measured_shares
from eval.metrics import costs
from eval.progress import Steps
from eval.protocol import Plan, run
from eval.replay import chain, text_ranks
from eval.replay_steps import most_steps
from eval.tree import TreeShape
from heads import load_head
from heads.checkpoint import MANIFEST, Head
from heads.command_line import parse_arguments
from heads.eagle import EagleHead
from heads.errors import HeadwayError, atomic_write_text, run_script, sha256_file
from heads.medusa import MedusaHead
from heads.target import Target, TargetEnds, auto_device

SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes beside the root
TRIED_PROMPTS, TRIED_TOKENS = 4, 32  # decoded with each size


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
    shares = measured_shares(ranks_PS, options.ranks)
    tried: list[dict[str, float]] = []
    size = options.size
    if size is None:
        target = Target.load(name, options.dtype, options.device)
        quick = load_head(options.head, device=target.device, dtype=target.dtype)
        assert isinstance(quick, MedusaHead | EagleHead)  # no other could be replayed
        shapes = {each: grow(shares, each) for each in SIZES}
        for each, cost in round_costs(quick, target, shapes, rows).items():
            accepted = _accepted_elsewhere(halves, options.ranks, each)
            tried.append({"size": each, "accepted": accepted, "round_cost": cost, "speedup": (1 + accepted) / cost})
        size = int(max(tried, key=lambda row: row["speedup"])["size"])
    shape = grow(shares, size)
    grown = {
        "paths": [list(path) for path in shape.paths],
        "accepted": _accepted_elsewhere(halves, options.ranks, size),
        "sizes_tried": tried,
        "accepted_by_chain": accepted_length(ranks_PS, chain(depth)),
        "conditional_accuracies": [[round(share, 6) for share in row] for row in accuracy_SR.tolist()],
        "positions": len(ranks_PS),
        "conversations": held_out,
        "head_manifest_sha256": sha256_file(options.head / MANIFEST),
        "features_manifest_sha256": sha256_file(folder / STORE_MANIFEST),
    }
    atomic_write_text(options.head / TREE, json.dumps(grown) + "\n")
    return grown


def round_costs(
    head: MedusaHead | EagleHead, target: Target, shapes: Mapping[int, TreeShape], rows: Sequence[StoredConversation]
) -> dict[int, float]:
    """A round's cost with each tree, in target steps, from decoding the first prompts of `rows`, all trees in turn."""
    trees = [Contender(str(size), static_tree(head, target, shape, None), None) for size, shape in shapes.items()]
    contenders = [build(BASELINE, target, None), *trees]
    plan = Plan([prompt_of(row) for row in rows[:TRIED_PROMPTS]], [], Settings(TRIED_TOKENS), repeats=1)
    with Steps(plan.work(len(contenders)), Console()) as steps:
        ledgers = run(target, contenders, plan, steps).ledgers
    found = {size: costs(ledgers[str(size)], ledgers[BASELINE]) for size in shapes}
    if not all(found.values()):
        raise HeadwayError("tree: the held-out prompts are answered with nothing, so no size can be tried; give --size")
    return {size: cost.total for size, cost in found.items() if cost is not None}


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
    for row in grown["sizes_tried"]:
        print(
            f"{row['size']:3} nodes: {row['accepted']:.3f} drafts accepted a round, which costs {row['round_cost']:.2f} target "
            f"steps: {row['speedup']:.2f}x expected"
        )
    print(
        f"{options.head / TREE}: {len(grown['paths'])} nodes, {grown['accepted']:.3f} drafts accepted a round at "
        f"{grown['positions']:,} held-out positions (the chain: {grown['accepted_by_chain']:.3f})"
    )


if __name__ == "__main__":
    run_script(main)
