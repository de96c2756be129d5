"""Where a run's figures go: the console, metrics.jsonl and wandb. Only the main process writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from heads.errors import atomic_write_text
from train.recipe import Log

METRICS = "metrics.jsonl"


class RunLog:
    """Logs one run from step `start` (the last one done) to `total`; rows of later steps that a killed run left are dropped.

    On a terminal a progress bar, elsewhere a line a step, with the replayed tau of the last validation.
    """

    def __init__(
        self,
        folder: Path,
        settings: Log,
        recipe: dict[str, Any],
        *,
        run_id: str,
        start: int,
        total: int,
        main: bool,
        replayed_tau: float | None,
    ) -> None:
        self.main, self.total, self._replayed_tau = main, total, replayed_tau
        if not main:
            return
        self.console = Console()
        _drop_later_rows(folder / METRICS, start)
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        self._wandb = _start_wandb(folder, settings, recipe, run_id)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total, completed=start, figures="")
        self._progress.start()

    def say(self, text: str) -> None:
        """A line on the main process's console."""
        if self.main:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, row: dict[str, Any], left_s: float) -> None:
        """Figures of one optimizer step; `left_s`: the time left, in seconds, for consoles without a progress bar."""
        if not self.main:
            return
        self._write(row, "train")
        tau = "-" if self._replayed_tau is None else f"{self._replayed_tau:.3f}"
        figures = f"loss {row['loss']:.3f}  replayed tau {tau}  {row['tokens_per_s']:,.0f} tokens/s"
        self._progress.update(self._task, completed=row["step"], figures=figures)
        if not self.console.is_terminal:
            self.say(f"step {row['step']}/{self.total}  {figures}  {left_s:,.0f} s left")

    def validation(self, row: dict[str, Any]) -> None:
        """Figures of one validation."""
        if self.main:
            self._write(row, "validation")
            self._replayed_tau = row["replayed_tau"]
            accuracies = " ".join(f"{accuracy:.3f}" for accuracy in row["accuracy"])
            self.say(
                f"step {row['step']}/{self.total}  validation: replayed tau {row['replayed_tau']:.3f}  "
                f"accuracy by head {accuracies}"
            )

    def close(self) -> None:
        """Flush and end; also after an error."""
        if self.main:
            self._progress.stop()
            self._metrics.close()
            if self._wandb is not None:
                self._wandb.finish()

    def _write(self, row: dict[str, Any], kind: str) -> None:
        self._metrics.write(json.dumps({"kind": kind, **row}) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log({f"{kind}/{key}": value for key, value in _flat(row).items()}, step=row["step"])


def _flat(row: dict[str, Any]) -> dict[str, float]:
    """Lists by head become one figure each."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        flat.update({f"{key}_{k}": item for k, item in enumerate(value)} if isinstance(value, list) else {key: value})
    return flat


def _drop_later_rows(path: Path, step: int) -> None:
    """Cut metrics back to the checkpoint a run resumes from; a last line that a kill cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    atomic_write_text(path, "".join(kept))


def _start_wandb(folder: Path, settings: Log, recipe: dict[str, Any], run_id: str) -> Any:
    """A wandb run, or None when switched off. `auto` goes online only where a key is configured; the key is never read here."""
    if settings.wandb == "off":
        return None
    # Not at the top: it takes seconds to import and is not needed when switched off.
    import wandb

    mode: Literal["online", "offline"] | None
    if settings.wandb != "auto":
        mode = settings.wandb
    elif "WANDB_MODE" in os.environ:
        mode = None  # wandb reads it
    else:
        mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    os.makedirs(folder / "wandb", exist_ok=True)
    quiet = wandb.Settings(silent=True, console="off")
    return wandb.init(
        mode=mode,
        project=settings.project,
        dir=str(folder),
        id=run_id,
        resume="allow",
        config=recipe,
        settings=quiet,
    )
