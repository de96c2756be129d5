"""A run's folder: the finished head, metrics.jsonl, and checkpoints/ with what a killed run needs to go on.

    checkpoints/step-000200/   engine/ (weights, optimizer), rng-<rank>.pt, state.json; written aside, then renamed
    checkpoints/best-000100/   the head that validated best so far

A step's folder names the best head it knows, so that a run resumed from it never takes a later one for it.
"""

from __future__ import annotations

import json
import os
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
    """The folder `out` of a run, which all its machines must share. `identity` is what a run and its continuation must share, and the manifest's first part:
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

    def latest(self, launch: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its state, or None; `launch`: `launch_facts` of this run.

        Raises HeadwayError when it cannot be resumed by this run.
        """
        folders = [folder for folder in sorted(self.checkpoints.glob(f"{STEP}*")) if _state(folder)]
        if not folders:
            return None
        state = _state(folders[-1])
        self.refuse_other(state)
        for key, now in launch.items():
            if (was := state.get("launch", {}).get(key)) != now:
                raise HeadwayError(
                    f"{folders[-1]}: was saved with {key} {was}, this run has {now}; optimizer and random states are kept "
                    f"per process and as that engine shards them, so resume with {key} {was}, or give another --out"
                )
        return folders[-1], state

    def half_written(self) -> list[str]:
        """Names of checkpoints that were left half written, or half deleted; they are never read."""
        partial = [path.name.removeprefix(PARTIAL) for path in self.checkpoints.glob(f"{PARTIAL}*")]
        return sorted(partial + [path.name for path in self.checkpoints.glob(f"{STEP}*") if not _state(path)])

    def sweep(self) -> None:
        """Remove what is half written."""
        for path in self.checkpoints.glob(f"{STEP}*"):
            if not _state(path):
                shutil.rmtree(path)
        for path in self.checkpoints.glob(f"{PARTIAL}*"):
            shutil.rmtree(path)

    def best(self, step: int) -> Path:
        """Where the head of `step` is kept when it is the best."""
        return self.checkpoints / f"{BEST}{step:06d}"

    def save(self, accelerator: Accelerator, launch: dict[str, Any], state: dict[str, Any], keep_last: int) -> None:
        """Write a checkpoint of `state` (with its `step`), together with all processes; then drop the old ones.

        Raises HeadwayError in a process that does not see the folder which the first one made.
        """
        name = f"{STEP}{state['step']:06d}"
        partial = self.checkpoints / f"{PARTIAL}{name}"
        if accelerator.is_main_process:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.sweep()
            partial.mkdir()
        accelerator.wait_for_everyone()
        if not partial.is_dir():
            raise HeadwayError(
                f"{self.out}: not seen by process {accelerator.process_index}; give an --out that all machines share"
            )
        accelerator.save_state(str(partial / "engine"))
        torch.save(_random_state(), partial / f"rng-{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            content = {**self.identity, "launch": launch, **state}
            (partial / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            _sync_tree(partial)
            os.replace(partial, self.checkpoints / name)
            self.prune(keep_last)
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

    def prune(self, keep_last: int) -> None:
        """Keep the newest checkpoints and the best heads that they know of."""
        folders = sorted(self.checkpoints.glob(f"{STEP}*"))
        known = {_state(folder)["best"]["step"] for folder in folders[-keep_last:]}
        heads = self.checkpoints.glob(f"{BEST}*")
        for folder in [
            *folders[:-keep_last],
            *(head for head in heads if int(head.name.removeprefix(BEST)) not in known),
        ]:
            partial = self.checkpoints / f"{PARTIAL}{folder.name}"
            os.replace(folder, partial)  # so that a kill half way leaves nothing that looks whole
            shutil.rmtree(partial)


def _at(values: dict[str, Any], dotted: str) -> Any:
    value: Any = values
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _state(folder: Path) -> dict[str, Any]:
    """The state.json of a checkpoint, which is written last; empty where the checkpoint is not whole."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return state


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
