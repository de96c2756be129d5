"""Products and norms of a few rows on CPUs.

Decoding multiplies 1 to some dozen rows with each weight: the time is that of reading the weights, if they are read
once. BLAS libraries for the CPU do not manage that for 2 rows and more, least of all in bfloat16 on CPUs without units
for it, where every row costs as much as the first one. heads/cpu_kernels.cpp does (benchmarks/linear.py). It is compiled
at first use, and gives a row the same bits whatever rows stand beside it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.cpp_extension import load

from heads.folders import cache_folder

log = logging.getLogger(__name__)

MOST_ROWS = 48  # beyond this a blocked product reuses weights and rows alike, and BLAS is ahead
WIDENED = 2**20  # elements of a bfloat16 weight that are held in float32 at a time


# Whether this CPU multiplies bfloat16 natively.
BF16_UNITS = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()

_built: bool | None = None


def build_kernels() -> bool:
    """Compile and load the kernels, once in a process; False, with a warning, where there is no C++ compiler."""
    global _built
    if _built is None:
        _built = _build()
    return _built


def _build() -> bool:
    built_for = f"{platform.machine()}_{torch.backends.cpu.get_cpu_capability()}_{torch.__version__}"
    name = re.sub(r"\W", "_", f"headway_kernels_{built_for}")
    flags = ["-O3", "-march=native", "-fopenmp"]
    source = Path(__file__).with_name("cpu_kernels.cpp")
    scripts = sysconfig.get_path("scripts")  # where the package ninja put its program, if no PATH leads there
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), scripts])
    folder = cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{name}.lock").open("w") as ours:
            fcntl.flock(ours, fcntl.LOCK_EX)  # let go by the system when its holder is killed
            # torch's own lock is a file that a killed compilation leaves, and for which everybody else would wait for ever
            (folder / "lock").unlink(missing_ok=True)
            load(
                name,
                [str(source)],
                extra_cflags=flags,
                extra_ldflags=["-fopenmp"],
                build_directory=str(folder),
                is_python_module=False,
            )
    except (RuntimeError, OSError) as error:
        log.warning("heads/cpu_kernels.cpp could not be compiled, so decoding on this CPU is slower (%s)", error)
        return False
    torch.library.register_fake("headway::few_rows", lambda x, weight, bias: x.new_empty(len(x), len(weight)))
    torch.library.register_fake("headway::rms_norm", lambda x, weight, eps: torch.empty_like(x))
    return True


def _goes_here(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these: on a CPU, all in float32 or all in bfloat16, something to sum over, no gradient wanted."""
    first = tensors[0]
    if not first.shape[-1]:
        return False
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.bfloat16):
        return False
    if any(tensor.dtype != first.dtype for tensor in tensors):  # under autocast, which sees to it
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def few_rows_linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b for x [..., I], weight [O, I], bias [O]; sums in float32 for bfloat16.

    On a CPU, without a gradient, few rows go through the kernel. Many rows in bfloat16, on a CPU without units for it,
    meet the weight widened piece by piece.
    """
    if not _goes_here(x, weight_OI, *(() if bias_O is None else (bias_O,))):
        return F.linear(x, weight_OI, bias_O)
    x_RI = x.reshape(-1, x.shape[-1])
    if len(x_RI) <= MOST_ROWS and weight_OI.is_contiguous() and build_kernels():
        offset_O = None if bias_O is None else bias_O.contiguous()
        y_RO = torch.ops.headway.few_rows(x_RI.contiguous(), weight_OI, offset_O)
    elif x.dtype == torch.bfloat16 and not BF16_UNITS:
        wide_RI = x_RI.float()
        pieces = weight_OI.split(max(1, WIDENED // weight_OI.shape[1]))
        y_RO = torch.cat([wide_RI @ piece.float().t() for piece in pieces], 1)
        y_RO = (y_RO if bias_O is None else y_RO + bias_O).to(x.dtype)
    else:
        return F.linear(x, weight_OI, bias_O)
    return y_RO.view(*x.shape[:-1], len(weight_OI))


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, as one operator."""
    if _goes_here(x, weight_H) and x.is_contiguous() and x.numel() <= MOST_ROWS * x.shape[-1] and build_kernels():
        return torch.ops.headway.rms_norm(x, weight_H, eps)
    return F.rms_norm(x, weight_H.shape, weight_H, eps)


class FewRowsLinear(nn.Linear):
    """nn.Linear whose forward is `few_rows_linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return few_rows_linear(x, self.weight, self.bias)


class FewRowsRMSNorm(nn.RMSNorm):
    """nn.RMSNorm whose forward is `rms_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)


def use_few_rows_linear(model: nn.Module) -> None:
    """Let every plain nn.Linear of `model` compute as FewRowsLinear. Parameters and names stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
