"""What made an artifact: versions, machine, and the heads that went into it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("headway", "torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on; "not installed" where one is used from source."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """The processor, how much of it torch uses, and the CUDA device where there is one."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def made_by(heads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`heads`: folder -> manifest."""
    return {"versions": versions(), "machine": machine(), "heads": heads}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
