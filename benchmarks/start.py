"""EAGLE heads that start at the target's output against heads of random weights: the replayed tau after the same steps.

    python benchmarks/start.py --features STORE       # writes benchmarks/results/eagle-start.json

The same recipe, seed, conversations and steps; only `head.start` differs. The interval is a paired bootstrap over the held-out
conversations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from results_file import write_result
from tap_formats import STEPS, figures_of, ratio, trained

from data_prep.store import FeatureStore
from eval.ledger import Ledger
from eval.replay import replay
from heads.target import DEFAULT_TARGET, TargetEnds
from train.sampler import split_rows

STARTS = ("random", "target")


def measure(
    features: Path,
    held_out: int = 100,
    steps: int = 72,
    seed: int = 0,
    folder: Path = Path("artifacts/start"),
) -> dict[str, Any]:
    """Train both and replay both.

    Args:
        features: store of the embedded target with the taps of an EAGLE-3 head
        held_out: conversations to replay
        steps: of each training
        seed: of each training
        folder: of the heads, which stay; a run that was killed goes on with them
    """
    ends, store = TargetEnds.load(DEFAULT_TARGET, "float32"), FeatureStore.open(features)
    rows = split_rows(store, held_out)[1]
    figures: dict[str, Any] = {"held_out": held_out, "steps": steps, "seed": seed, "heads": {}}
    ledgers: dict[str, Ledger] = {}
    for start in STARTS:
        recipe = {"data.features": features.resolve(), "data.held_out": held_out, "seed": seed}
        head = trained(folder.resolve() / start, recipe | {"head.start": start, "optim.max_steps": steps})
        ledgers[start] = replay(head, ends, (store[row] for row in rows), STEPS).ledger
        figures["heads"][start] = figures_of(ledgers[start])
        print(f"{start}: {figures['heads'][start]}", flush=True)
    figures["target_over_random"] = ratio(ledgers["random"], ledgers["target"])
    print(figures["target_over_random"])
    return figures


if __name__ == "__main__":
    write_result("eagle-start", auto_cli(measure, as_positional=False))
