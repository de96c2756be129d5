"""EAGLE-3 training here against the speculators library: tokens a second and peak memory, alternating in one run.

    python benchmarks/train_speed.py        # writes benchmarks/results/scale-train.json, about half an hour on 2 cores

The same head (one layer of the embedded target's shape), the same stored states of the same conversations, training-time-test
steps, loss and precision, AdamW on both sides. Ours is the trainer's own step on a feature store; theirs its own training epoch
(speculators_train.py) with eager attention, packs ready in memory. Each size is a pack of theirs, and as many tokens of a step
of ours. Their default is 8192; on a CPU a smaller pack may be faster, so the best one found is compared too.

A size that does not fit into the machine's memory there is said and left out of their side.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from jsonargparse import auto_cli
from peak import measured
from results_file import RESULTS, write_result
from safetensors.torch import save_file
from speculators_environment import PACKAGE, build_environment

from data_prep.collect import Settings, collect
from data_prep.conversations import SAMPLES
from data_prep.store import FeatureStore
from heads.target import DEFAULT_TARGET, TargetEnds, resolve
from train.accelerator import make_accelerator
from train.eagle import Eagle, EagleMethod, EagleRecipe
from train.loop import prepare
from train.recipe import Data, Optim, Save
from train.sampler import plan, split_rows
from train.steps import Steps

DEFAULT_PACK = 8192
TAPS = (2, 15, 27)
HELD_OUT = 2
SIDE = Path(__file__).with_name("speculators_train.py")


class Ours:
    """The trainer's step on a store."""

    def __init__(self, features: Path, precision: str, tokens: int) -> None:
        self.recipe = EagleRecipe(
            target=DEFAULT_TARGET,
            precision=precision,
            data=Data(features=str(features), held_out=HELD_OUT),
            head=Eagle(taps=TAPS, fc_norm=True, norm_output=True),
            optim=Optim(epochs=1),
            save=Save(confirm=0),
        )
        self.store = FeatureStore.open(features)
        self.ends = TargetEnds.load(DEFAULT_TARGET, "float32" if precision == "fp32" else "bfloat16")
        self.method = EagleMethod(self.recipe, self.store, self.ends)
        self.steps: Steps = prepare(self.method, self.recipe, self.store, make_accelerator(self.recipe))
        self.rows: list[int] = []
        for row in split_rows(self.store, HELD_OUT)[0]:
            if sum(self.store.lengths[row] for row in self.rows) < tokens:
                self.rows.append(row)

    def run(self, size: int) -> dict[str, Any]:
        """One epoch in steps of `size` tokens."""
        windows = plan(self.rows, self.store.lengths, batch_tokens=size, epochs=1, max_steps=None, seed=0)
        taken = measured(lambda: [self.steps.train_step(window) for window in windows], "cpu")
        tokens = sum(self.store.lengths[row] for row in self.rows)
        return {"tokens": tokens, "steps": len(windows), **taken._asdict()}

    def hand_over(self, folder: Path) -> None:
        """The same conversations, states and vocabulary, and what to train, for the other side."""
        stored = [self.store[row] for row in self.rows]
        tensors = {
            "input_ids": torch.cat([each.ids_T for each in stored]),
            "loss_mask": torch.cat([each.turn_T > 0 for each in stored]),
            "hidden_states": torch.cat([torch.cat([each.taps[tap] for tap in TAPS], 1) for each in stored]),
            "verifier_last_hidden_states": torch.cat([each.last_TH for each in stored]),
            "lengths": torch.tensor([len(each.ids_T) for each in stored]),
        }
        save_file(tensors, folder / "conversations.safetensors")
        drafted_D = self.method.head.vocabulary().ids_D
        t2d_V = torch.zeros(self.ends.vocab_size, dtype=torch.bool)
        t2d_V[drafted_D] = True
        save_file({"t2d": t2d_V, "d2t": drafted_D - torch.arange(len(drafted_D))}, folder / "vocabulary.safetensors")
        head = self.recipe.head
        settings = {
            "target": str(resolve(DEFAULT_TARGET)),
            "taps": list(TAPS),
            "fc_norm": head.fc_norm,
            "norm_output": head.norm_output,
            "train_output": head.train_output,
            "steps": head.steps,
            "decay": head.decay,
            "lr": self.recipe.optim.lr,
            "dtype": "bfloat16" if self.recipe.precision == "bf16" else "float32",
        }
        (folder / "settings.json").write_text(json.dumps(settings))


class Theirs:
    """The other side's process."""

    def __init__(self, folder: Path) -> None:
        command = [str(build_environment()), str(SIDE), str(folder)]
        environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    def run(self, size: int) -> dict[str, Any]:
        """One epoch in packs of `size` tokens; `error` where that does not fit into memory."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"pack": size}), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{SIDE.name} ended with {self.process.wait()}; what it said is above")
        return dict(json.loads(line))


def alternate(ours: Ours, theirs: Theirs, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, Any]]:
    """By size: the runs of both sides, or their error. A first round warms up and finds what does not fit."""
    found: dict[int, dict[str, Any]] = {size: {"ours": [], "theirs": []} for size in sizes}
    for number in range(rounds + 1):
        for size in sizes:
            for side, bench in ((("ours", ours), ("theirs", theirs)), (("theirs", theirs), ("ours", ours)))[number % 2]:
                if side == "theirs" and "error" in found[size]:
                    continue
                made = bench.run(size)
                print(f"{side}, {size}: {made}", flush=True)
                if "error" in made:
                    found[size]["error"] = made["error"]
                elif number:
                    found[size][side].append(made)
    return found


def compared(runs: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second and memory of one size, and the ratios where both sides ran."""
    figures: dict[str, Any] = {}
    for side in ("ours", "theirs"):
        if not runs[side]:
            continue
        figures[side] = {
            "tokens_per_step": runs[side][0]["tokens"] / runs[side][0]["steps"],
            "tokens_per_s": statistics.median(run["tokens"] / run["seconds"] for run in runs[side]),
            "each_round": [run["tokens"] / run["seconds"] for run in runs[side]],
            "peak_mib": max(run["peak_mib"] for run in runs[side]),
            "added_mib": max(run["added_mib"] for run in runs[side]),
        }
    if "error" in runs:
        figures["error"] = runs["error"]
    if "theirs" in figures:
        figures["speed_ratio"] = statistics.median(
            (ours["tokens"] / ours["seconds"]) / (theirs["tokens"] / theirs["seconds"])
            for ours, theirs in zip(runs["ours"], runs["theirs"], strict=True)
        )
        figures["peak_ratio"] = figures["ours"]["peak_mib"] / figures["theirs"]["peak_mib"]
        figures["added_ratio"] = figures["ours"]["added_mib"] / figures["theirs"]["added_mib"]
    return figures


def main(
    sizes: Sequence[int] = (DEFAULT_PACK, 4096, 2048, 1024, 512),
    tokens: int = DEFAULT_PACK,
    rounds: int = 3,
    precision: str = "fp32",
    out: Path = RESULTS,
) -> None:
    """Measure all sizes.

    Args:
        sizes: tokens of a pack, and of a step of ours.
        tokens: of the conversations trained on in each run, about.
        rounds: of each size and side, alternating; a further one warms up.
        precision: fp32 or bf16 (autocast on both sides).
        out: folder of the result.
    """
    with tempfile.TemporaryDirectory() as scratch:
        features, folder = Path(scratch) / "features", Path(scratch) / "side"
        folder.mkdir()
        taps = ",".join(map(str, TAPS))
        collect(Settings(conversations=SAMPLES, out=features, taps=taps, max_tokens=2 * tokens))
        ours = Ours(features, precision, tokens)
        ours.hand_over(folder)
        with Theirs(folder) as theirs:
            by_size = {size: compared(runs) for size, runs in alternate(ours, theirs, sizes, rounds).items()}
    fitting = [size for size in sizes if "theirs" in by_size[size]]
    if not fitting:
        sys.exit(f"{PACKAGE}: none of the sizes {list(sizes)} fits into memory")
    best = max(fitting, key=lambda size: by_size[size]["theirs"]["tokens_per_s"])
    fastest = max(sizes, key=lambda size: by_size[size]["ours"]["tokens_per_s"])
    figures = {
        "package": PACKAGE,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "head": {"steps": ours.recipe.head.steps, "draft_vocab_size": ours.recipe.head.draft_vocab_size},
        "conversations": len(ours.rows),
        "tokens": sum(ours.store.lengths[row] for row in ours.rows),
        "rounds": rounds,
        "sizes": {str(size): cell for size, cell in by_size.items()},
        "their_default": DEFAULT_PACK,
        "their_largest_that_fits": max(fitting),
        "their_best": best,
        "our_best": fastest,
        "best_against_best": by_size[fastest]["ours"]["tokens_per_s"] / by_size[best]["theirs"]["tokens_per_s"],
    }
    for size, cell in by_size.items():
        if "speed_ratio" in cell:
            print(f"{size:5}: {cell['speed_ratio']:.2f} times as fast, {cell['peak_ratio']:.2f} of the peak memory")
        else:
            print(f"{size:5}: {cell['error']}")
    print(f"the best of each ({fastest}, {best}): {figures['best_against_best']:.2f} times as fast")
    name = "scale-train" if precision == "fp32" else f"scale-train-{precision}"
    print(write_result(name, figures, out))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
