"""Several training runs one after the other, in the processes of one launch or alone: starting a launch takes longest.

accelerate launch tests/train/worker.py JOBS.json     a list of jobs (keywords of `run_job`)
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from safetensors.torch import save_file
from torch import nn

from data_prep.store import FeatureStore, StoredConversation
from heads import linear
from heads.errors import HeadwayError
from tests.train.conftest import killed_after, reset_accelerate
from train import eagle, medusa

MAINS = {"medusa": medusa.main, "eagle": eagle.main}
GRADIENT, BEFORE = "gradient/", "before/"


def run_job(
    trainer: str,
    arguments: Sequence[str],
    *,
    deepspeed: str | None = None,
    masked: Sequence[str] = (),
    record: str | None = None,
    die_after: int | None = None,
    refused: str | None = None,
) -> None:
    """Train by `arguments`. `deepspeed`: another configuration than the launch's; `masked`: conversations without a supervised
    token; `record`: file for the first step's gradient and the weights before it; `die_after`: steps to a death; `refused`: what
    the error says that the run must end with."""
    reset_accelerate()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [f"{trainer}.py", *arguments])
        # A group that is made anew finds the old one's addresses in the launch's store, and waits for ever.
        patch.setattr(PartialState, "destroy_process_group", lambda self, group=None: None)
        patch.setattr(linear, "_built", False)
        if deepspeed:
            # By import_module: the package's attribute of that name is torch itself.
            patch.setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
            patch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", deepspeed)
        if masked:
            _mask(patch, set(masked))
        if record:
            stack.enter_context(recorded(Path(record)))
        if die_after is not None:
            stack.enter_context(killed_after(die_after))
        if refused:
            stack.enter_context(pytest.raises(HeadwayError, match=refused))
        MAINS[trainer]()


def _mask(patch: pytest.MonkeyPatch, ids: set[str]) -> None:
    original = FeatureStore.__getitem__

    def read(self: FeatureStore, row: int) -> StoredConversation:
        stored = original(self, row)
        return replace(stored, turn_T=torch.zeros_like(stored.turn_T)) if stored.id in ids else stored

    patch.setattr(FeatureStore, "__getitem__", read)


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Write the whole gradient of the first step, before it is clipped, and the weights it was taken at."""
    with pytest.MonkeyPatch.context() as patch:
        if "ACCELERATE_USE_DEEPSPEED" in os.environ:
            from deepspeed import DeepSpeedEngine
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

            step = DeepSpeedEngine.step

            def engine_step(self: Any, *args: Any) -> None:
                if not path.exists() and self.is_gradient_accumulation_boundary():
                    _write(path, self.module, safe_get_full_grad, safe_get_full_fp32_param)
                step(self, *args)

            patch.setattr(DeepSpeedEngine, "step", engine_step)
        clip = Accelerator.clip_grad_norm_

        def clip_grad_norm(self: Accelerator, *args: Any) -> Any:
            if not path.exists() and self.state.deepspeed_plugin is None:
                _write(
                    path, self.unwrap_model(self._models[-1]), lambda weight: weight.grad, lambda weight: weight.data
                )
            return clip(self, *args)

        patch.setattr(Accelerator, "clip_grad_norm_", clip_grad_norm)
        yield


def _write(path: Path, model: nn.Module, gradient: Any, value: Any) -> None:
    found = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            found[GRADIENT + name] = gradient(weight).detach().float().clone()
            found[BEFORE + name] = value(weight).detach().float().clone()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # no process looks for the file later than another
    if os.environ.get("RANK", "0") == "0":
        save_file(found, path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(**job)
