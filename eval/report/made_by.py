"""What made an artifact: versions, machine, and the heads that went into it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from heads.versions import versions

PACKAGES = ("headway", "torch", "transformers", "numpy")


def software() -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on."""
    return {"python": platform.python_version(), **versions(*PACKAGES)}


def machine() -> dict[str, Any]:
    """The processor, how much of it torch uses, and the CUDA device where there is one."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def made_by(heads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`heads`: folder -> manifest."""
    return {
        "versions": software(),
        "machine": machine(),
        "heads": heads,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
