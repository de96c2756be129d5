"""What the tests of collection share: the bytes of a store, refusals, and the script in processes of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.collect import Settings, collect
from heads.errors import HeadwayError

ROOT = Path(__file__).parents[2]
Make = Callable[..., Settings]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if name.startswith("features-")}


def refused(settings: Settings, message: str) -> None:
    """Assert that the collection is refused and leaves the folder as it was."""
    before = contents(settings.out) if settings.out.exists() else None
    with pytest.raises(HeadwayError, match=message):
        collect(settings)
    assert (contents(settings.out) if settings.out.exists() else None) == before


def launch(settings: Settings, *, ranks: int = 1) -> subprocess.Popen[bytes]:
    command = [sys.executable]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command += ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines", "1"]
        command += ["--num_processes", str(ranks), "--main_process_port", str(port), "--mixed_precision", "no"]
    command += [str(ROOT / "data_prep" / "collect.py")]
    command += [
        f"--{name}={value}" for name, value in vars(settings).items() if value is not None and value is not False
    ]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
