"""The few-row product: right values, and the same bits whatever stands beside a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from heads import linear
from heads.linear import (
    MOST_ROWS,
    FewRowsLinear,
    FewRowsRMSNorm,
    build_kernels,
    few_rows_linear,
    rms_norm,
    use_few_rows_linear,
)

SHAPES = [(1, 8), (2, 16), (7, 24), (64, 13), (33, 100), (96, 64)]  # [outputs, inputs]; rests of 8 lanes and of pairs


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 19, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_product_in_float64(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    for outputs, inputs in SHAPES:
        x, weight = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (rows, outputs))
        bias = torch.randn(outputs, generator=generator).to(dtype)
        y = few_rows_linear(x.view(1, rows, inputs), weight, bias)
        assert y.shape == (1, rows, outputs)
        assert y.dtype == dtype
        exact = F.linear(x.double(), weight.double(), bias.double())
        # bfloat16 keeps 8 bits: half a unit in the last place of the result, and sums in float32 before it
        bound = 1e-4 + (exact.abs() * 2**-8 if dtype == torch.bfloat16 else 0)
        assert bool(((y[0].double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    assert build_kernels(), "no C++ compiler"
    x, weight = torch.randn(MOST_ROWS, 100).to(dtype), torch.randn(501, 100).to(dtype)
    alone = torch.cat([few_rows_linear(row[None], weight) for row in x])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (2, 3, 5, 6, 11, MOST_ROWS):
                assert torch.equal(few_rows_linear(x[:rows], weight), alone[:rows])
    finally:
        torch.set_num_threads(threads)


def test_gradients_go_the_ordinary_way() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8)
    few_rows_linear(x, weight).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.sum(0).expand(3, 8), atol=1e-6)
    bias = torch.zeros(5, requires_grad=True)  # alone in wanting one
    few_rows_linear(x.detach(), weight, bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [3.0] * 5


def test_a_bias_with_gaps_in_memory() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5, 2)[:, 0]
    assert torch.allclose(few_rows_linear(x, weight, bias), F.linear(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_to_sum_over(dtype: torch.dtype) -> None:
    """A sum of nothing is 0, and the bias stays; the kernels say that they were not made for it."""
    x, weight, bias = torch.empty(2, 3, 0, dtype=dtype), torch.empty(5, 0, dtype=dtype), torch.arange(5, dtype=dtype)
    assert torch.equal(few_rows_linear(x, weight), torch.zeros(2, 3, 5, dtype=dtype))
    assert torch.equal(few_rows_linear(x, weight, bias), bias.expand(2, 3, 5))
    assert rms_norm(x, weight[0], 1e-5).shape == (2, 3, 0)
    assert build_kernels(), "no C++ compiler"
    with pytest.raises(RuntimeError, match="rows of no numbers"):
        torch.ops.headway.few_rows(x[0], weight, None)
    with pytest.raises(RuntimeError, match="rows of no numbers"):
        torch.ops.headway.rms_norm(x, weight[0], 1e-5)


def test_without_a_compiler_the_values_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    with_kernel = few_rows_linear(x, weight)
    monkeypatch.setattr(linear, "build_kernels", lambda: False)
    assert torch.allclose(few_rows_linear(x, weight).float(), with_kernel.float(), rtol=2**-7, atol=1e-3)


def test_a_failed_build_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no c++")

    monkeypatch.setattr(linear, "load", fails)
    assert linear._build() is False
    assert "could not be compiled" in caplog.text


def test_plain_linear_layers_are_turned_in_place() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Embedding(3, 8))
    names = list(model.state_dict())
    use_few_rows_linear(model)
    assert type(model[0]) is FewRowsLinear
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_the_formula(dtype: torch.dtype) -> None:
    for size in (1, 8, 13, 64, 100):
        x, weight = torch.randn(2, 3, size).to(dtype), torch.randn(size).to(dtype)
        wide = x.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        found = rms_norm(x, weight, 1e-5)
        assert found.dtype == dtype
        bound = 1e-5 + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 1e-6)
        assert bool(((found.double() - exact).abs() <= bound).all())


def test_autocast_sees_to_mixed_dtypes() -> None:
    """States in bfloat16 meet weights in float32 when a head is validated under autocast."""
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(8, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = few_rows_linear(x, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=0.02, atol=0.05)


def test_the_norm_as_a_module() -> None:
    norm, x = FewRowsRMSNorm(24, 1e-3), torch.randn(2, 5, 24)
    nn.init.normal_(norm.weight)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected)


def test_the_lock_of_a_killed_compilation_is_taken_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """torch waits for that file for ever, whoever left it."""
    folders: list[Path] = []

    def load(*_: object, build_directory: str, **__: object) -> None:
        folders.append(Path(build_directory))
        assert not (folders[-1] / "lock").exists()
        (folders[-1] / "lock").touch()
        raise RuntimeError("killed")

    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(linear, "load", load)
    assert not linear._build()
    assert not linear._build()
    assert folders[0] == folders[1]
    assert folders[0].parent == tmp_path
