"""What a long run has finished so far: one JSON line each, on the disk before the next one, so that a kill loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self

from heads.errors import HeadwayError


class Journal:
    """An append-only file: a header that says what the run is, then its entries. One process at a time.

    Attributes: path, entries (those of earlier runs, in their order), torn (whether the last line had been cut by a
    kill; it is removed).

    Raises HeadwayError when another process writes it, when it was begun with another header, and for a line that is
    not JSON.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise HeadwayError(
                f"{path}: another process is writing it; wait for that one, or give another --out"
            ) from error
        self._file.seek(0)
        *lines, rest = self._file.read().split(b"\n")
        self.torn = bool(rest)
        if self.torn:
            self._file.truncate(sum(len(line) + 1 for line in lines))
        read = [self._parse(line, number) for number, line in enumerate(lines, 1)]
        if read and read[0] != header:
            differs = _differences(read[0], header)
            self._file.close()
            raise HeadwayError(
                f"{path}: line 1: was begun with other settings ({differs}); repeat those, or remove it to start anew"
            )
        if not read:
            self._write(header)
        self.entries: list[dict[str, Any]] = read[1:]

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; it is on the disk when this returns."""
        self._write(entry)

    def remove(self) -> None:
        """Delete the file: its entries are in their place."""
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise HeadwayError(
                f"{self.path}: line {number}: is not what was written there; remove the line or the file"
            ) from error
        return entry


def _differences(before: Any, now: dict[str, Any]) -> str:
    if not isinstance(before, dict):
        return "no header"
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)!r}, now {now.get(name)!r}" for name in names)
