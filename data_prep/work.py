"""Long work in batches: what is finished is kept beside the result, and counted where a person looks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from heads.errors import HeadwayError


class Work:
    """Finished batches of a run, one JSON line each, so that a kill loses one batch.

    Raises HeadwayError when the file belongs to a run with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[str, Any] = {}
        header = json.dumps({"settings": settings}, sort_keys=True)
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what follows the last newline was cut
        if lines and lines[0].decode() != header:
            raise HeadwayError(
                f"{path}: line 1: was begun with other settings; repeat those, or remove it to start anew"
            )
        self.done = {entry["batch"]: entry["rows"] for entry in map(json.loads, lines[1:])}
        path.write_bytes(b"".join(line + b"\n" for line in lines or [header.encode()]))

    def run(self, batch: str, compute: Callable[[], list[Any]]) -> list[Any]:
        """The rows of a batch: as stored, or computed and stored."""
        if batch not in self.done:
            self.done[batch] = compute()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"batch": batch, "rows": self.done[batch]}) + "\n")
                file.flush()
                os.fsync(file.fileno())
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
