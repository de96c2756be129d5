"""Progress of a long pass over tokens."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

REPORT_SECONDS = 10.0  # between lines where there is no terminal


class Meter:
    """Tokens done, tokens/s and time left: a bar on a terminal, else a line every few seconds; silent unless `enabled`."""

    def __init__(self, label: str, total: int, enabled: bool) -> None:
        self.label, self.total, self.done = label, total, 0
        self.started = self.reported = time.monotonic()
        console = Console()
        self.lines = enabled and not console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not enabled or self.lines)
        self.task = self.bar.add_task(label, total=total)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def advance(self, tokens: int) -> None:
        """Count tokens that went through the target."""
        self.done += tokens
        now = time.monotonic()
        rate = self.done / max(now - self.started, 1e-9)
        text = f"{self.label}{self.done:,} of {self.total:,} tokens, {rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=self.done, description=text)
        if self.lines and (now - self.reported >= REPORT_SECONDS or self.done == self.total):
            self.reported = now
            print(f"{text}, {(self.total - self.done) / rate:,.0f} s left", flush=True)
