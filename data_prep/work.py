"""Long work in batches: what is finished is kept beside the result, and counted where a person looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data_prep.journal import Journal


class Work(Journal):
    """Finished batches of a run by their names, so that a kill loses one batch. Raises HeadwayError as Journal does."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        super().__init__(path, settings)
        self.done: dict[str, list[Any]] = {entry["batch"]: entry["rows"] for entry in self.entries}

    def run(self, batch: str, compute: Callable[[], list[Any]]) -> list[Any]:
        """The rows of a batch: as stored, or computed and stored."""
        if batch not in self.done:
            self.done[batch] = compute()
            self.append({"batch": batch, "rows": self.done[batch]})
        return self.done[batch]


class Counter:
    """A bar with the time left on a terminal, else a line a batch."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(label, total=total)
        self.bar.start()

    def show(self, done: int) -> None:
        """Set what is done; the bar stops when that is everything."""
        self.bar.update(self.task, completed=min(done, self.total))
        if not self.console.is_terminal:
            print(f"{self.label}: {min(done, self.total)} of {self.total}", flush=True)
        if done >= self.total:
            self.bar.stop()
