"""Time and memory of one verification call at serving size: 64 rows x 64 nodes x 152,000 tokens in bf16 (1.2 GB).

    python benchmarks/verify.py        # writes benchmarks/results/exact-verify.json, about a minute

Beside it stands the naive way, which draws at every node, measured on the first 4 rows and scaled to 64. Bytes are those of every tensor an operation
returned in memory of its own: `peak` is the most that lived at once, `largest` the biggest single one.

Shape suffixes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from results_file import write_result
from torch.utils._python_dispatch import TorchDispatchMode

from eval.chooser import SeededChooser
from eval.law import PointMass
from eval.sampling import Sampling, target_law
from eval.tree import DraftTree, TreeShape
from eval.verify import verify

ROWS, NODES, VOCAB, REPEATS, NAIVE_ROWS = 64, 64, 152_000, 3, 4
# 64 nodes: three deep paths of 5 below each of ten first tokens' best, and siblings; depth 5, width 10.
SHAPE = TreeShape.of(
    [
        *([rank] for rank in range(10)),
        *([first, rank] for first in range(4) for rank in range(5)),
        *([0, rank, below] for rank in range(3) for below in range(4)),
        *([1, rank, 0] for rank in range(3)),
        *([0, 0, rank, below] for rank in range(2) for below in range(4)),
        *([0, 0, 0, 0, rank] for rank in range(6)),
        *([0, 1, 0, rank] for rank in range(4)),
    ]
)


class LivingBytes(TorchDispatchMode):
    """Counts the bytes of tensors made under it: the most alive at once and the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return
        self.alive[key] = size
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def naive(logits_BNV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One token for every node from the law of every node, a row at a time so that it fits in memory at all."""
    tokens = []
    for row_NV in logits_BNV:
        law, _ = target_law(row_NV, sampling)
        tokens.append(law.ids_R if isinstance(law, PointMass) else law.probs_RV.multinomial(1)[:, 0])
    return torch.stack(tokens)


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Median seconds, and bytes in one more run."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    with LivingBytes() as living:
        call()
    return {"seconds": statistics.median(seconds), "peak_bytes": living.peak, "largest_bytes": living.largest}


def likely_tree(logits_BNV: torch.Tensor) -> DraftTree:
    """A tree whose first children are the target's own choices, so that rows walk to every depth."""
    tokens_BM = torch.randint(0, VOCAB, (ROWS, len(SHAPE.paths)), generator=torch.Generator().manual_seed(1))
    parents = SHAPE.parents[1:]
    for index, (path, parent) in enumerate(zip(SHAPE.paths, parents, strict=True)):
        deep = torch.arange(ROWS) % (SHAPE.max_depth + 1) >= len(path)
        if path[-1] == 0:
            tokens_BM[deep, index] = logits_BNV[deep, parent].argmax(-1)
    return DraftTree.static(torch.zeros(ROWS, dtype=torch.int64), tokens_BM, SHAPE)


def main() -> None:
    assert len(SHAPE.paths) + 1 == NODES, len(SHAPE.paths)
    generator = torch.Generator().manual_seed(0)
    logits_BNV = torch.empty(ROWS, NODES, VOCAB, dtype=torch.bfloat16)
    for row_NV in logits_BNV:
        row_NV.copy_(torch.randn(NODES, VOCAB, generator=generator) * 2)
    tree, chooser = likely_tree(logits_BNV), SeededChooser(range(ROWS))
    figures = []
    for name, sampling in (
        ("greedy", Sampling()),
        ("temperature 0.7", Sampling(temperature=0.7)),
        ("temperature 0.7, top-p 0.9", Sampling(temperature=0.7, top_p=0.9)),
    ):
        ours = timed(lambda sampling=sampling: verify(logits_BNV, tree, sampling, chooser))
        theirs = timed(lambda sampling=sampling: naive(logits_BNV[:NAIVE_ROWS], sampling))
        theirs["seconds"] *= ROWS / NAIVE_ROWS
        accepted = verify(logits_BNV, tree, sampling, chooser).accepted_B.float().mean().item()
        figures.append({"settings": name, "verify": ours, "every_node": theirs, "accepted": accepted})
        print(
            f"{name:28} {ours['seconds']:7.3f} s, peak {ours['peak_bytes'] / 2**20:7.1f} MiB, largest "
            f"{ours['largest_bytes'] / 2**20:6.1f} MiB; every node {theirs['seconds']:7.3f} s; accepted {accepted:.2f}"
        )
        sys.stdout.flush()
    write_result(
        "exact-verify",
        {"rows": ROWS, "nodes": NODES, "vocab": VOCAB, "logits_bytes": logits_BNV.nbytes, "runs": figures},
    )


if __name__ == "__main__":
    main()
