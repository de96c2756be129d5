"""EAGLE-3 trained from int8 taps against bf16 ones: the replayed tau of both on the same held-out conversations.

    python benchmarks/tap_formats.py --conversations SET/conversations.jsonl     # writes benchmarks/results/scale-tap_formats.json

Two stores of the same conversations, one with taps in bf16 and one in int8; the same recipe and seed on each, by the trainer's
own command. Both heads then replay the validation conversations with the states of the bf16 store, since decoding gives a head
the target's own states. The interval is a paired bootstrap over conversations.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import auto_cli
from results_file import write_result

from data_prep.collect import Settings, collect
from data_prep.conversations import SAMPLES
from data_prep.store import FeatureStore
from eval.ledger import Ledger
from eval.metrics import Floats, bootstrap, mean_accepted_length, per_prompt
from eval.replay import replay
from heads import load_head
from heads.checkpoint import Head
from heads.target import DEFAULT_TARGET, TargetEnds
from train.sampler import split_rows

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs" / "recipes" / "smollm2-eagle3.yaml"
FORMATS = ("bf16", "int8")
TAPS = "2,15,27"
STEPS = 4  # of the chain that is replayed


def ratio(first: Ledger, second: Ledger) -> dict[str, Any]:
    """Tau of the second over that of the first, with its interval; the same conversations are paired."""
    numbers, ours = per_prompt(first)
    others, theirs = per_prompt(second)
    assert numbers == others, "both replay the same conversations"
    both = np.concatenate([ours[:, :2], theirs[:, :2]], axis=1)

    def statistic(total: Floats) -> Floats:
        return (total[..., 2] / total[..., 3]) / (total[..., 0] / total[..., 1])

    return {"ratio": float(statistic(both.sum(0))), "ci95": bootstrap(both, statistic)}


def trained(out: Path, recipe: Mapping[str, Any]) -> Head:
    """A head by the trainer's own command, from the recipe for this target with other settings; nothing saved on the way."""
    fixed = {"config": RECIPE, "out": out, "save.every": 10**6, "save.confirm": 0, "log.wandb": "off"}
    options = [part for key, value in {**fixed, **recipe}.items() for part in (f"--{key}", str(value))]
    subprocess.run([sys.executable, "train/eagle.py", *options], check=True, cwd=ROOT)
    return load_head(out)


def figures_of(ledger: Ledger) -> dict[str, Any]:
    """Tau with its interval, and of how many rounds."""
    tau = mean_accepted_length(ledger)
    return {"tau": tau.micro, "tau_ci95": tau.ci95, "rounds": len(ledger.rounds)}


def measure(
    conversations: Path = SAMPLES,
    tokens: int | None = None,
    held_out: int = 160,
    epochs: int = 1,
    seed: int = 0,
    batch_tokens: int = 1024,
    folder: Path = Path("artifacts/tap_formats"),
) -> dict[str, Any]:
    """Collect, train and replay both.

    Args:
        conversations: to train on and to validate with
        tokens: take about so many of them; null takes all
        held_out: conversations to replay
        epochs: of each training
        seed: of each training
        batch_tokens: of a training step
        folder: of the stores and the heads, which stay; a run that was killed goes on with them
    """
    ends = TargetEnds.load(DEFAULT_TARGET, "float32")
    figures: dict[str, Any] = {"held_out": held_out, "epochs": epochs, "seed": seed, "heads": {}}
    ledgers: dict[str, Ledger] = {}
    folder = folder.resolve()  # the trainer runs in another one
    stores = {name: folder / name for name in FORMATS}
    for name, features in stores.items():
        collect(Settings(conversations, features, taps=TAPS, tap_format=name, max_tokens=tokens, held_out=0))
    store = FeatureStore.open(stores["bf16"])
    figures |= {"tokens": store.tokens, "supervised_tokens": store.supervised_tokens}
    rows = split_rows(store, held_out)[1]
    for name, features in stores.items():
        recipe = {"data.features": features, "seed": seed, "optim.epochs": epochs, "optim.batch_tokens": batch_tokens}
        head = trained(folder / f"head-{name}", recipe | {"data.held_out": held_out})
        ledgers[name] = replay(head, ends, (store[row] for row in rows), STEPS).ledger
        figures["heads"][name] = figures_of(ledgers[name])
        figures["heads"][name]["bytes"] = sum(path.stat().st_size for path in features.iterdir())
        print(f"{name}: {figures['heads'][name]}", flush=True)
    figures["int8_over_bf16"] = ratio(ledgers["bf16"], ledgers["int8"])
    print(figures["int8_over_bf16"])
    return figures


if __name__ == "__main__":
    write_result("scale-tap_formats", auto_cli(measure, as_positional=False))
