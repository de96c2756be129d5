"""Seconds and peak memory of a call. Imports torch alone, as scripts in other libraries' environments use it too."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Taken(NamedTuple):
    """What a call took: seconds, MiB allocated at most beyond what was there before, MiB in all (on a CPU: of the process)."""

    seconds: float
    added_mib: float
    peak_mib: float


def measured(call: Callable[[], Any], device: str) -> Taken:
    """Run `call` on device "cpu" or "cuda". On a CPU the memory is what the process has resident (Linux)."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, begun = torch.cuda.memory_allocated(), clock(device)
        call()
        seconds, peak = clock(device) - begun, torch.cuda.max_memory_allocated()
        return Taken(seconds, (peak - before) / 2**20, peak / 2**20)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before_kib, begun = resident("VmRSS"), clock(device)
    call()
    seconds, peak_kib = clock(device) - begun, resident("VmHWM")
    return Taken(seconds, (peak_kib - before_kib) / 1024, peak_kib / 1024)


def clock(device: str) -> float:
    """Seconds, after all that `device` was given is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def resident(name: str) -> int:
    """A line of the process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])
