"""Reading the weights of a causal LM from a folder: quantised or not, whole or split over processes, and never half."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from heads.errors import HeadwayError

QUANTISED = re.compile(
    r"scale|qweight|qzeros|_blocks|absmax|quant_state|packed"
)  # what names of a quantiser's tensors hold


def load_causal_lm(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, *, tensor_parallel: bool = False
) -> Any:
    """A frozen model with every one of its weights from the folder's files, on `device`.

    FP8, AWQ, GPTQ and other quantised weights are what transformers makes of them on this machine: computed with as they are where
    their kernels run, else (FP8, MXFP4) expanded to `dtype`. `tensor_parallel`: split over all processes by the model's own plan.
    Raises HeadwayError where a quantiser's package is missing or unknown, a weight is missing or not understood, or the
    heads do not divide among the processes.
    """
    method = _quantisation(folder, config)
    options: dict[str, Any] = {}
    if tensor_parallel:
        _require_divisible(folder, config)
        options["distributed_config"] = DistributedConfig(tp_plan="auto")
    elif method and device.type != "cpu":
        options["device_map"] = {"": str(device)}  # kernels want their weights where they compute
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except (ImportError, RuntimeError, ValueError) as error:
        if not method:
            raise
        raise HeadwayError(
            f"{folder}: quantised by '{method}', which does not run here ({_first_line(error)}); install what it asks for, or "
            "give the folder of the model that is not quantised"
        ) from error
    _require_whole(folder, report, bool(config.get_text_config().num_hidden_layers))
    if not options:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _quantisation(folder: Path, config: Any) -> str | None:
    """The method of a quantised model, or None. Raises HeadwayError for one that transformers would skip, weights and all."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    given = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING}
    if method not in known:
        raise HeadwayError(
            f"{folder}: quantised by '{method}', which transformers does not know (it knows {', '.join(sorted(known))}); give the "
            "folder of the model that is not quantised"
        )
    return method


def _require_divisible(folder: Path, config: Any) -> None:
    processes, text = torch.distributed.get_world_size(), config.get_text_config()
    if not any(name.startswith("layers.") for name in getattr(text, "base_model_tp_plan", None) or {}):
        raise HeadwayError(
            f"{folder}: transformers has no plan that splits the layers of '{text.model_type}'; keep a whole target in each process"
        )
    heads = int(text.num_attention_heads)
    for name, count in (
        ("attention heads", heads),
        ("key-value heads", int(getattr(text, "num_key_value_heads", None) or heads)),
    ):
        if count % processes:
            raise HeadwayError(
                f"{folder}: {count} {name} cannot be split over {processes} processes; use a number of processes that divides "
                "them, or a whole target in each"
            )


def _require_whole(folder: Path, report: dict[str, Any], with_layers: bool) -> None:
    """Raise HeadwayError for weights that would be random, or quantised ones that nothing has read."""
    left = sorted(name for name in report["unexpected_keys"] if QUANTISED.search(name))
    if missing := sorted(report["missing_keys"]):
        raise HeadwayError(
            f"{folder}: {len(missing)} weights of the model are in no file, the first is '{missing[0]}'; download the folder "
            "again, or give another"
        )
    if left and with_layers:  # of a model cut down to its ends all layers are left
        raise HeadwayError(
            f"{folder}: holds '{left[0]}' and {len(left) - 1} more tensors of a quantised model that its config does not explain; "
            "add the quantization_config, or give the folder of the model that is not quantised"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].strip().rstrip(".") if str(error).strip() else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
