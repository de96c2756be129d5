"""Benchmark results on disk: one JSON file a benchmark, with what it takes to read its figures later.

Scripts in this folder are started by path, so they import it as `from results_file import write_result`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eval.report.made_by import machine, software
from heads.errors import atomic_write_text

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, figures: Any, folder: Path = RESULTS) -> Path:
    """Write {name, command, versions, machine, figures} to `folder`/`name`.json and return that path."""
    script = Path(sys.argv[0])
    content = {
        "name": name,
        "command": " ".join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]]),
        "versions": software(),
        "machine": machine(),
        "figures": figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    atomic_write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path
