"""An environment with the speculators library in Headway's cache folder; it uses this one's torch. Built on first use, under a minute."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from heads.folders import cache_folder

PACKAGE = "speculators==0.9.0"
BESIDE = (
    "hs-connectors==0.9.0",
    "loguru",
    "pydantic-settings",
    "openai",
    "jiter",
    "distro",
    "sniffio",
    "transformers==5.19.0",  # the newest that it allows
)


def build_environment() -> Path:
    """Its Python. Raises RuntimeError, with the end of what pip said, where it cannot be built."""
    folder = cache_folder() / "venv-speculators"
    python, stamp = folder / "bin" / "python", folder / f".{PACKAGE}"
    if not stamp.exists():
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--no-deps", PACKAGE, *BESIDE],
        ):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        path = folder / "lib" / version / "site-packages" / "beside.pth"
        path.write_text(sysconfig.get_paths()["purelib"] + "\n")
        stamp.touch()
    return python
