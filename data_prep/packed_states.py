"""States in fewer bytes: as they are, or in 8 bits by groups of 64 channels with a scale a group.

A scale a token would not do: a few channels of the residual stream are hundreds of times larger than the rest, and every
other channel would be rounded to nothing. Shapes: n rows, H hidden, G = ceil(H / 64) groups, the last one maybe shorter.

| format | bytes a state | |x - read| is at most |
|---|---|---|
| fp32, bf16 | 4 H, 2 H | rounding to that dtype |
| int8 | H + 2 G | scale / 2 |
| fp8 (e4m3) | H + 2 G | the larger of |x| / 16 and scale / 1024 |
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch.nn import functional as F

TapFormat = Literal["fp32", "bf16", "int8", "fp8"]
FORMATS: tuple[str, ...] = get_args(TapFormat)
GROUP = 64  # channels of a scale
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
PACKED = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}  # and the largest number that is used


def state_bytes(hidden_size: int, tap_format: str) -> int:
    """Bytes of one state [H], its scales included."""
    if tap_format in PLAIN:
        return hidden_size * PLAIN[tap_format].itemsize
    return hidden_size + _groups(hidden_size) * torch.bfloat16.itemsize


def pack(states_nH: torch.Tensor, tap_format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Finite states -> what is stored [n, H] and, of an 8-bit format, the scales bf16 [n, G]."""
    if tap_format in PLAIN:
        return states_nH.to(PLAIN[tap_format]), None
    dtype, largest = PACKED[tap_format]
    rows, hidden = states_nH.shape
    # In float64 the quotient of two such numbers is never on the wrong side of the middle between two steps.
    x_nGC = _by_groups(states_nH.double())
    scales_nG = _bf16_above(x_nGC.abs().amax(-1) / largest)
    divisor_nG = torch.where(scales_nG > 0, scales_nG, 1).double()
    q_nGC = x_nGC / divisor_nG[..., None]
    if dtype == torch.int8:
        q_nGC = q_nGC.round()
    q_nGC = q_nGC.clamp(-largest, largest)
    return q_nGC.to(dtype).reshape(rows, -1)[:, :hidden].contiguous(), scales_nG


def unpack(stored_nH: torch.Tensor, scales_nG: torch.Tensor | None) -> torch.Tensor:
    """What `pack` made -> states [n, H]: as stored, or of an 8-bit format float32, which holds the products exactly."""
    if scales_nG is None:
        return stored_nH
    rows, hidden = stored_nH.shape
    states_nGC = _by_groups(stored_nH.float()) * scales_nG.float()[..., None]
    return states_nGC.reshape(rows, -1)[:, :hidden]


def _groups(hidden_size: int) -> int:
    return -(-hidden_size // GROUP)


def _by_groups(x_nH: torch.Tensor) -> torch.Tensor:
    """[n, H] -> [n, G, 64], the last group filled up with zeros."""
    groups = _groups(x_nH.shape[1])
    return F.pad(x_nH, (0, groups * GROUP - x_nH.shape[1])).reshape(len(x_nH), groups, GROUP)


def _bf16_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest bf16 that is not below x >= 0: a scale rounded down would leave a group's largest number out of reach."""
    below = x.to(torch.bfloat16)
    return torch.where(below.double() < x, torch.nextafter(below, torch.full_like(below, torch.inf)), below)
