"""The few-row kernel against torch's own product, over the embedded target's weights, alternating in one run.

python benchmarks/linear.py        # writes benchmarks/results/decoder-linear.json, about a minute
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from results_file import write_result
from torch.nn import functional as F

from heads.errors import HeadwayError
from heads.linear import build_kernels, few_rows_linear

LAYERS = 30
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * LAYERS + [(49152, 576)]  # [outputs, inputs]
ROWS = [1, 2, 4, 5, 8, 16, 26, 48]
ROUNDS = 7


def milliseconds(
    product: Callable[..., torch.Tensor], weights: list[torch.Tensor], rows: dict[int, torch.Tensor]
) -> float:
    started = time.perf_counter()
    for weight_OI in weights:
        product(rows[weight_OI.shape[1]], weight_OI)
    return 1e3 * (time.perf_counter() - started)


@torch.inference_mode()
def main() -> None:
    if not build_kernels():
        raise HeadwayError("heads/cpu_kernels.cpp was not compiled; install a C++ compiler")
    figures = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(shape).to(dtype) for shape in SHAPES]
        for count in ROWS:
            rows = {size: torch.randn(count, size).to(dtype) for size in (576, 1536)}
            pairs = []
            for _ in range(1 + ROUNDS):
                pairs.append([milliseconds(product, weights, rows) for product in (few_rows_linear, F.linear)])
            kernel_ms, torch_ms = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
            ratio = statistics.median(theirs / ours for ours, theirs in pairs[1:])
            name = str(dtype).removeprefix("torch.")
            figures.append({"dtype": name, "rows": count, "kernel_ms": kernel_ms, "torch_ms": torch_ms, "ratio": ratio})
            print(f"{name} {count:3d} rows: kernel {kernel_ms:7.1f} ms, torch {torch_ms:7.1f} ms, {ratio:.2f}x")
    write_result("decoder-linear", figures)


if __name__ == "__main__":
    main()
