"""The accelerator of a run: its processes, precision and accumulation, from the recipe."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from transformers.integrations import unset_hf_deepspeed_config

from heads.errors import HeadwayError
from heads.target import auto_device, auto_dtype
from train.recipe import Recipe


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The accelerator of a run. Called first: it is what tells the processes of a launch from each other.

    Raises HeadwayError when `accelerate launch --cpu` was told to start several: it starts one and says nothing.
    """
    without_gpu = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    # Unless the backend is named, every process believes it is alone while DeepSpeed shards over all.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if without_gpu and deepspeed else []
    precision = recipe.precision
    if precision == "auto":
        precision = "bf16" if auto_dtype("auto", auto_device("auto")) == torch.bfloat16 else "fp32"
    accelerator = Accelerator(
        gradient_accumulation_steps=recipe.optim.accumulation,
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=without_gpu and not deepspeed,
        kwargs_handlers=handlers,
    )
    if "MASTER_ADDR" in os.environ and accelerator.num_processes == 1 and "LOCAL_RANK" not in os.environ:
        raise HeadwayError(
            "accelerate launch --cpu: starts one process whatever --num_processes says; give --multi_gpu instead"
        )
    if plugin := accelerator.state.deepspeed_plugin:
        # The recipe is the one source of these; DeepSpeed asks for a micro batch size that nothing here depends on.
        plugin.deepspeed_config["gradient_accumulation_steps"] = recipe.optim.accumulation
        plugin.deepspeed_config["gradient_clipping"] = recipe.optim.clip
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        # Or transformers would shard the frozen target under ZeRO-3 as if it were trained; it stays outside the engine.
        unset_hf_deepspeed_config()
    set_seed(recipe.seed)
    return accelerator


def launch_facts(accelerator: Accelerator) -> dict[str, Any]:
    """How a run is launched, as far as a checkpoint depends on it: `processes`, `kind` (with the ZeRO stage), `precision`."""
    kind = accelerator.distributed_type.value
    if plugin := accelerator.state.deepspeed_plugin:
        zero = plugin.deepspeed_config["zero_optimization"]
        offloaded = any(
            zero.get(f"offload_{part}", {}).get("device", "none") != "none" for part in ("optimizer", "param")
        )
        kind = f"{kind} ZeRO-{zero['stage']}" + (", offloaded" if offloaded else "")
    return {"processes": accelerator.num_processes, "kind": kind, "precision": accelerator.mixed_precision}
