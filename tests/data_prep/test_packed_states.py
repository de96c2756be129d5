"""States in 8 bits: the error that the format promises, computed anew in float64, for every magnitude a channel may have."""

from __future__ import annotations

import math

import pytest
import torch

from data_prep.packed_states import FORMATS, pack, state_bytes, unpack

SIZES = (64, 32, 100, 576)


def states(hidden: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes, with channels that stand out by 300, zeros, and numbers near the ends of bf16."""
    source = torch.Generator().manual_seed(hidden)
    x_nH = torch.randn(400, hidden, generator=source) * torch.exp(5 * torch.randn(400, 1, generator=source))
    x_nH[:, 3] *= 300
    x_nH[0] = 0
    x_nH[1, : hidden // 2] = 0
    x_nH[2] *= 1e-30
    x_nH[3] = 3e38 * torch.rand(hidden, generator=source)
    x_nH[4] = torch.arange(hidden) / 2  # halves: in the middle between two steps
    return x_nH.to(dtype)


def scale_of_channel(scales_nG: torch.Tensor, hidden: int) -> torch.Tensor:
    return torch.stack([scales_nG[:, channel // 64].double() for channel in range(hidden)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", SIZES)
def test_int8_is_within_half_a_step_everywhere(hidden: int, dtype: torch.dtype) -> None:
    x_nH = states(hidden, dtype)
    stored_nH, scales_nG = pack(x_nH, "int8")
    assert scales_nG is not None
    assert stored_nH.dtype == torch.int8
    assert scales_nG.dtype == torch.bfloat16
    assert scales_nG.shape == (400, math.ceil(hidden / 64))
    read_nH = unpack(stored_nH, scales_nG)
    assert read_nH.dtype == torch.float32
    error_nH = (x_nH.double() - read_nH.double()).abs()
    assert bool((error_nH <= scale_of_channel(scales_nG, hidden) / 2).all())
    assert torch.equal(read_nH[0], torch.zeros(hidden))
    # A scale is what the largest number of its group needs, and no more than bf16 must round it up by.
    for group in range(scales_nG.shape[1]):
        needed_n = x_nH[:, 64 * group : 64 * group + 64].double().abs().amax(1) / 127
        large_n = needed_n > 1e-30
        assert bool((scales_nG[:, group].double() >= needed_n)[large_n].all())
        assert bool((scales_nG[:, group].double() <= needed_n * (1 + 2**-7))[large_n].all())


@pytest.mark.parametrize("hidden", SIZES)
def test_fp8_is_within_a_sixteenth_or_a_small_step(hidden: int) -> None:
    x_nH = states(hidden)
    stored_nH, scales_nG = pack(x_nH, "fp8")
    assert scales_nG is not None
    assert stored_nH.dtype == torch.float8_e4m3fn
    error_nH = (x_nH.double() - unpack(stored_nH, scales_nG).double()).abs()
    bound_nH = torch.maximum(x_nH.double().abs() / 16, scale_of_channel(scales_nG, hidden) / 1024)
    assert bool((error_nH <= bound_nH).all())
    assert float((error_nH / bound_nH.clamp(min=1e-300)).max()) > 0.9  # the bound is no looser than it need be


def test_a_group_is_not_disturbed_by_the_outliers_of_another() -> None:
    x_nH = torch.randn(50, 192, generator=torch.Generator().manual_seed(0))
    x_nH[:, 70] = 1e4
    read_nH = unpack(*pack(x_nH, "int8"))
    for calm in (slice(0, 64), slice(128, 192)):
        assert float((read_nH - x_nH)[:, calm].abs().max()) < 0.02
    assert float((read_nH - x_nH)[:, 64:128].abs().max()) > 1


@pytest.mark.parametrize(("tap_format", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_plain_formats_are_a_cast(tap_format: str, dtype: torch.dtype) -> None:
    x_nH = states(100)
    stored_nH, scales_nG = pack(x_nH, tap_format)
    assert scales_nG is None
    assert torch.equal(stored_nH, x_nH.to(dtype))
    assert unpack(stored_nH, None) is stored_nH


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("tap_format", FORMATS)
def test_bytes_are_those_of_the_tensors(tap_format: str, hidden: int) -> None:
    stored_nH, scales_nG = pack(torch.randn(10, hidden), tap_format)
    held = stored_nH.numel() * stored_nH.itemsize + (0 if scales_nG is None else 2 * scales_nG.numel())
    assert 10 * state_bytes(hidden, tap_format) == held


def test_rows_are_packed_alike_whatever_they_are_packed_with() -> None:
    x_nH = states(100)
    whole, parts = pack(x_nH, "int8"), [pack(part, "int8") for part in x_nH.split(7)]
    for index in (0, 1):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))  # type: ignore[arg-type, misc]
