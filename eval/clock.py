"""One clock for every measurement: wall time, with the device's queue drained before each reading."""

from __future__ import annotations

import time

import torch


class Clock:
    """Reads `time.perf_counter` after synchronising the device, so that a reading never splits work in flight.

    On the CPU, where calls return when they are done, a reading is the counter alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
