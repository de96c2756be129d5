"""A run's folder: the finished head, metrics.jsonl, and checkpoints/ with what a killed run needs to go on.

    checkpoints/step-000200/   engine/ (weights, optimizer), rng-<rank>.pt, state.json; written aside, then renamed
    checkpoints/best-000100/   the head that validated best so far

A step's folder names the best head it knows, so that a run resumed from it never takes a later one for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from heads.checkpoint import CONFIG, MANIFEST, load_head, read_manifest, save_head
from heads.errors import HeadwayError
from heads.provenance import head_facts
from heads.target import fingerprint_parts, resolve
from train.recipe import differing_key

STEP, PARTIAL, BEST = "step-", ".partial-", "best-"


class RunFolder:
    """The folder `out` of a run. `identity` is what a run and its continuation must share, and the manifest's first part:
    `recipe`, `target` (name, fingerprint), `features` (manifest_sha256, ...).
    """

    def __init__(self, out: str | Path, identity: dict[str, Any]) -> None:
        self.out, self.identity = Path(out), identity
        self.checkpoints = self.out / "checkpoints"
        if self.out.exists() and not self.out.is_dir():
            raise HeadwayError(f"{self.out}: a file, not a folder; give another --out")
        self._finished: dict[str, Any] | None = None
        if (self.out / CONFIG).exists():
            self._finished = read_manifest(self.out) if (self.out / MANIFEST).exists() else {}
            if "recipe" not in self._finished:
                raise HeadwayError(f"{self.out}: holds a model that no training run wrote; give another --out")
            self.refuse_other(self._finished)

    @property
    def finished(self) -> dict[str, Any] | None:
        """The manifest of the head when the run is finished."""
        return self._finished

    def refuse_other(self, old: dict[str, Any]) -> None:
        """Raise HeadwayError when what lies in the folder belongs to another recipe, other features or another target."""
        start_over = f"give another --out, or delete {self.out} to start over"
        if key := differing_key(old["recipe"], self.identity["recipe"]):
            was, now = (_at(recipe, key) for recipe in (old["recipe"], self.identity["recipe"]))
            raise HeadwayError(f"{self.out}: was trained with {key} {was}, this run has {now}; {start_over}")
        for key in ("features.manifest_sha256", "target.fingerprint"):
            was, now = _at(old, key), _at(self.identity, key)
            if was != now:
                raise HeadwayError(f"{self.out}: was trained with {key} {was}, now it is {now}; {start_over}")

    def latest(self, processes: int) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its state, or None. Raises HeadwayError when it cannot be resumed by this run."""
        folders = sorted(self.checkpoints.glob(f"{STEP}*"))
        if not folders:
            return None
        state = json.loads((folders[-1] / "state.json").read_text(encoding="utf-8"))
        self.refuse_other(state)
        if state["processes"] != processes:
            raise HeadwayError(
                f"{folders[-1]}: was saved by {state['processes']} processes, this run has {processes}; random and optimizer "
                f"states are kept per process, so resume with {state['processes']}, or give another --out"
            )
        return folders[-1], state

    def half_written(self) -> list[str]:
        """Names of checkpoints that a kill left half written; they are never read."""
        return sorted(path.name.removeprefix(PARTIAL) for path in self.checkpoints.glob(f"{PARTIAL}*"))

    def sweep(self) -> None:
        """Remove what is half written."""
        for path in self.checkpoints.glob(f"{PARTIAL}*"):
            shutil.rmtree(path)

    def best(self, step: int) -> Path:
        """Where the head of `step` is kept when it is the best."""
        return self.checkpoints / f"{BEST}{step:06d}"

    def save(self, accelerator: Accelerator, state: dict[str, Any], keep_last: int) -> None:
        """Write a checkpoint of `state` (with its `step`), together with all processes; then drop the old ones."""
        name = f"{STEP}{state['step']:06d}"
        partial = self.checkpoints / f"{PARTIAL}{name}"
        if accelerator.is_main_process:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.sweep()
            partial.mkdir()
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial / "engine"))
        torch.save(_random_state(), partial / f"rng-{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            content = {**self.identity, "processes": accelerator.num_processes, **state}
            (partial / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            _sync_tree(partial)
            os.replace(partial, self.checkpoints / name)
            self._prune(keep_last)
        accelerator.wait_for_everyone()

    def load(self, accelerator: Accelerator, folder: Path) -> None:
        """Put weights, optimizer and random state of a checkpoint back, in every process."""
        accelerator.load_state(str(folder / "engine"))
        states = torch.load(folder / f"rng-{accelerator.process_index}.pt", weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])

    def finish(self, best_step: int, manifest: dict[str, Any]) -> None:
        """Make the best head the folder's own, with the final manifest: what the head is, and each part of its target."""
        head, target = load_head(self.best(best_step)), self.identity["target"]
        facts = {
            "target": {**target, "parts": fingerprint_parts(resolve(target["name"]))},
            "head": head_facts(head),
        }
        save_head(head, self.out, {**self.identity, **manifest, **facts})

    def _prune(self, keep_last: int) -> None:
        folders = sorted(self.checkpoints.glob(f"{STEP}*"))
        for folder in folders[:-keep_last]:
            shutil.rmtree(folder)
        known = {
            json.loads((folder / "state.json").read_text(encoding="utf-8"))["best"]["step"]
            for folder in folders[-keep_last:]
        }
        for folder in self.checkpoints.glob(f"{BEST}*"):
            if int(re.sub(r"\D", "", folder.name)) not in known:
                shutil.rmtree(folder)


def _at(values: dict[str, Any], dotted: str) -> Any:
    value: Any = values
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _random_state() -> dict[str, torch.Tensor]:
    """The states of the generators that training draws from: torch's, on CPU and on this process's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _sync_tree(folder: Path) -> None:
    """Flush to disk all that a rename is about to declare whole."""
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
