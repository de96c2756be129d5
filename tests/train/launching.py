"""Starting processes for tests: one or more launchers of accelerate, whose workers die with them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
CONFIGS = ROOT / "configs" / "accelerate"
DDP = ["--config_file", str(CONFIGS / "cpu2.yaml")]


def environment() -> dict[str, str]:
    """One thread a process. DeepSpeed's extension is compiled once for this environment: a minute or two, the first time."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
    }


def launch(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit code and output of a launcher."""
    return launch_all([command], timeout)[0]


def launch_all(commands: Sequence[list[str]], timeout: float) -> list[tuple[int, str]]:
    """Exit codes and outputs of launchers that run at the same time, as on several machines; all end when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(number) for number in range(len(commands))]
        launchers = []
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as file:
                launchers.append(
                    subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
                )
        deadline = time.monotonic() + timeout
        try:
            while any(each.poll() is None for each in launchers) and not any(each.poll() for each in launchers):
                if time.monotonic() > deadline:
                    raise TimeoutError("\n".join(log.read_text()[-4000:] for log in logs))
                time.sleep(0.1)
        finally:
            for each in launchers:
                each.terminate()  # a launcher passes it on; killed outright it would leave its workers behind
                each.wait(60)
        return [(each.returncode, log.read_text()) for each, log in zip(launchers, logs, strict=True)]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
