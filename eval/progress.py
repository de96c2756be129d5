"""Progress of long work on the console: a bar on a terminal, else a line now and then, both with the time left."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY_S = 15.0


class Steps:
    """Counts work done out of `total` (any unit) under a heading that may change."""

    def __init__(self, total: float, console: Console) -> None:
        self._total, self._console = total, console
        self._done, self._heading = 0.0, ""
        self._start = self._said = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def heading(self, text: str) -> None:
        """Name the phase that begins."""
        self._heading = text
        self._bar.update(self._task, description=text)
        self._say()

    def advance(self, amount: float) -> None:
        """Count work as done."""
        self._done += amount
        self._bar.advance(self._task, amount)
        if time.monotonic() - self._said > EVERY_S:
            self._say()

    def _say(self) -> None:
        if self._console.is_terminal:
            return
        self._said = time.monotonic()
        spent = self._said - self._start
        left = f", about {spent * (self._total / self._done - 1):.0f} s left" if self._done else ""
        self._console.print(
            f"{self._heading}: {100 * self._done / self._total:.0f} %, {spent:.0f} s{left}", soft_wrap=True
        )
