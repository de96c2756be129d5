"""x W^T against (W x^T)^T for the embedded target's weights and few rows, fp32, alternating in one run.

python benchmarks/linear.py        # writes benchmarks/results/line-linear.json, under a minute
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from results_file import write_result
from torch.nn import functional

SHAPES = [(49152, 576), (1536, 576), (576, 1536), (576, 576)]
ROWS = [1, 2, 4, 5, 8, 16, 64, 256]
ROUNDS = 9


def milliseconds(call: Callable[[], torch.Tensor]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    figures = []
    for outputs, inputs in SHAPES:
        weight_OI = torch.randn(outputs, inputs)
        for rows in ROWS:
            x_RI = torch.randn(rows, inputs)

            def plain(x_RI: torch.Tensor = x_RI, weight_OI: torch.Tensor = weight_OI) -> torch.Tensor:
                return functional.linear(x_RI, weight_OI)

            def turned(x_RI: torch.Tensor = x_RI, weight_OI: torch.Tensor = weight_OI) -> torch.Tensor:
                return torch.mm(weight_OI, x_RI.t()).t()

            plain(), turned()
            pairs = [(milliseconds(plain), milliseconds(turned)) for _ in range(ROUNDS)]
            plain_ms, turned_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(first / second for first, second in pairs)
            figures.append(
                {
                    "weight": [outputs, inputs],
                    "rows": rows,
                    "plain_ms": plain_ms,
                    "turned_ms": turned_ms,
                    "ratio": ratio,
                }
            )
            print(f"[{outputs}, {inputs}] {rows:4d} rows: {plain_ms:8.3f} ms, turned {turned_ms:8.3f} ms, {ratio:.2f}x")
    write_result("line-linear", figures)


if __name__ == "__main__":
    main()
