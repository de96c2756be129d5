"""What a run would take, said before it: parameters, memory by part, steps, tokens, and the time at the speed of a few steps."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from heads.target import TargetEnds
from train.memory import ADAMW_STATES, Sharding, head_memory
from train.steps import Steps

TIMED = 3  # steps, after one that is not timed
STATES = {"adamw": ADAMW_STATES, "sgd": 0}  # fp32 values that an optimizer keeps of each parameter
MB = 1e6


def peak_beyond(device: torch.device, call: Callable[[], Any]) -> int | None:
    """Bytes that `call` needs at most beyond what is there: on CUDA exact, on Linux of the process; None where neither is."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        call()
        return None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def dry_run(steps: Steps, ends: TargetEnds) -> None:
    """Print what the run of `steps` would take, after a few of them. Weights change in memory; nothing is written."""
    accelerator, optim = steps.accelerator, steps.recipe.optim
    sharding, frozen = Sharding.of(accelerator), steps.parameters - steps.trained
    memory = {
        **head_memory(steps.trained, frozen, STATES[optim.name], sharding),
        "target's embedding and output": _bytes_of(ends),
    }
    windows = steps.windows[: 1 + TIMED]
    (batch,) = steps.batches([windows[0].rows])
    first, rows = steps.train_step(windows[0]), list[dict[str, Any]]()
    timed = windows[1:] or windows
    peak = peak_beyond(accelerator.device, lambda: rows.extend(steps.train_step(window) for window in timed))
    begun = time.monotonic()
    validated = steps.validate()
    validation_s = time.monotonic() - begun
    if peak is not None:
        memory["activations and batches (measured)"] = max(0, peak - memory["gradients"])
    tokens = sum(steps.store.lengths[row] for window in steps.windows for row in window.rows)
    speed = sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    validations = -(-len(steps.windows) // steps.recipe.save.every)
    time_left = _words(tokens / speed + validations * validation_s)
    lines = (
        f"parameters: {steps.trained:,} trained, {frozen:,} frozen",
        f"memory of each of {sharding.processes} process(es), MB: "
        + ", ".join(f"{part} {size / MB:,.2f}" for part, size in memory.items()),
        f"store: {_words_of_store(steps)}; a step's conversations {sum(tensor.nbytes for tensor in batch.values()) / MB:,.2f} MB",
        f"steps: {len(steps.windows):,} in {steps.windows[-1].epoch + 1} epoch(s), {tokens:,} tokens",
        f"time: {time_left}; {speed:,.0f} tokens/s in {len(rows)} timed steps, {validations} validation(s) of {validation_s:,.1f} s",
        f"loss {first['loss']:.3f} at step 1, replayed tau {validated['replayed_tau']:.3f} after step {len(windows)}",
        "dry run: nothing was written",
    )
    for line in lines:
        accelerator.print(line)


def _words_of_store(steps: Steps) -> str:
    on_disk = steps.store.manifest["totals"].get("bytes")
    return (
        "none, the target itself comes on top" if on_disk is None else f"{on_disk / MB:,.2f} MB on disk, read as needed"
    )


def _bytes_of(ends: TargetEnds) -> int:
    tied = AutoConfig.from_pretrained(ends.path).get_text_config().tie_word_embeddings
    return ends.lm_head_weight.nbytes * (1 if tied else 2)


def _words(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"
