"""Errors a user can act on, and writes that leave nothing half done."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path


class HeadwayError(Exception):
    """A fault in what the user gave: one line that says what is wrong, where (file, row) and how to mend it."""


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main`; a HeadwayError becomes one line on stderr and exit code 2."""
    try:
        code = main()
    except HeadwayError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a kill at any moment, sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
