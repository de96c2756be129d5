"""The feature store: bytes a token in each format, and collection beside the bare forward pass of the same model on the same rows.

    python benchmarks/store.py        # writes benchmarks/results/scale-store.json, about ten minutes on 2 cores

Conversations are the bundled samples, the target is the embedded one with the taps of the demo's EAGLE-3 head. Contenders take
the same rows in the same padded batches, alternating in one run: the model's own forward (logits of every position), its decoder
alone, and all that data_prep/collect.py does once the target is loaded (states, teacher's logits, packing, checksums, disk).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from results_file import RESULTS, write_result
from torch.nn.utils.rnn import pad_sequence

from data_prep.collect import Settings, collect_share, compute, join_ranks
from data_prep.conversations import SAMPLES, read_conversations
from data_prep.packed_states import FORMATS
from data_prep.plan import Planned, cut_batches, cut_shards, describe, plan, share_of_rank
from data_prep.shards import Layout, StoredConversation, free_names, write_shard
from heads.target import DEFAULT_TARGET, Target

TAPS = (2, 15, 27)
TOP_K = 32


class Bench:
    """A loaded target, the rows of a run, and a scratch folder."""

    def __init__(self, conversations: int, dtype: str, folder: Path) -> None:
        self.state, self.folder = join_ranks(), folder
        source = describe(DEFAULT_TARGET, dtype, self.state.device)
        self.target = Target.load(DEFAULT_TARGET, dtype, str(self.state.device))
        planned = plan(read_conversations(SAMPLES)[:conversations], source, 2048, None, print)
        self.rows = share_of_rank(planned, 0, 1)
        self.tokens = sum(row.entry.length for row in self.rows)
        self.settings = Settings(conversations=SAMPLES, out=folder)
        self.layout = Layout(source.hidden_size, TAPS, "bfloat16", "bf16", 0)

    def forward(self, model: Callable[..., Any]) -> None:
        """`model` on every batch of collection, nothing kept."""
        for shard in cut_shards(self.rows, self.settings.shard_tokens):
            for batch in cut_batches(shard, self.settings.batch_tokens):
                ids_BT, real_BT = padded(batch)
                with torch.no_grad():
                    model(
                        input_ids=ids_BT.to(self.target.device),
                        attention_mask=real_BT.to(self.target.device),
                        use_cache=False,
                    )
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()

    def collect(self, tap_format: str) -> None:
        """By data_prep/collect.py, into a folder that did not exist."""
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            layout = replace(self.layout, tap_format=tap_format)
            collect_share(self.target, self.rows, replace(self.settings, out=Path(out)), layout, self.state)


def padded(batch: Sequence[Planned]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask) int64 [B, T] as collection pads them."""
    ids = [row.ids_T.long() for row in batch]
    return pad_sequence(ids, batch_first=True), pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)


def throughput(bench: Bench, rounds: int) -> dict[str, Any]:
    """Tokens (padding not counted) a second of each contender, and its ratio to the bare forward of the same round."""
    contenders: dict[str, Callable[[], None]] = {
        "forward": lambda: bench.forward(bench.target.model),
        "decoder": lambda: bench.forward(bench.target.decoder),
        "collect": lambda: bench.collect("bf16"),
        "collect, int8": lambda: bench.collect("int8"),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, rounds):  # the first one warms up
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            contenders[name]()
            rate = bench.tokens / (time.perf_counter() - begun)
            if number >= 0:
                rates[name].append(rate)
                print(f"{name}: {rate:,.0f} tokens/s", flush=True)
    return {
        name: {
            "tokens_per_second": statistics.median(rates[name]),
            "each_round": rates[name],
            "of_forward": statistics.median(
                its / bare for its, bare in zip(rates[name], rates["forward"], strict=True)
            ),
        }
        for name in contenders
    }


def sizes(bench: Bench) -> dict[str, Any]:
    """Bytes a token that the files of each format take, sidecars included, alone and over those of bf16."""
    exact = replace(bench.layout, tap_format="fp32", top_k=TOP_K)
    batches = list(cut_batches(bench.rows, bench.settings.batch_tokens))
    computed = [row for batch in batches for row in compute(bench.target, batch, exact)]
    kinds = {name: replace(bench.layout, tap_format=name) for name in FORMATS}
    kinds[f"int8, {TOP_K} logits"] = replace(bench.layout, tap_format="int8", top_k=TOP_K)
    found = {name: size_of(bench, layout, computed) for name, layout in kinds.items()}
    return {
        name: size | {"of_bf16": size["bytes_per_token"] / found["bf16"]["bytes_per_token"]}
        for name, size in found.items()
    }


def size_of(bench: Bench, layout: Layout, computed: Sequence[StoredConversation]) -> dict[str, Any]:
    """Files of one layout."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        out = Path(scratch)
        begun, names = 0, free_names(out, 0, 1)
        for shard in cut_shards(bench.rows, bench.settings.shard_tokens):
            write_shard(out, next(names), layout, [row.entry for row in shard], computed[begun : begun + len(shard)])
            begun += len(shard)
        written = sum(path.stat().st_size for path in out.iterdir())
    return {
        "bytes_per_token": written / bench.tokens,
        "planned": layout.bytes_per_token(),
        "by_part": layout.bytes_by_part(),
        "of_2H_a_state": written / bench.tokens / (2 * layout.hidden_size * (len(TAPS) + 1)),
    }


def measure(conversations: int = 64, rounds: int = 3, dtype: str = "float32", out: Path = RESULTS) -> None:
    """Measure sizes and speed.

    Args:
        conversations: of the bundled samples.
        rounds: of each contender, alternating; a further one warms up.
        dtype: of the target.
        out: folder of the result.
    """
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(conversations, dtype, Path(scratch))
        figures = {
            "conversations": len(bench.rows),
            "tokens": bench.tokens,
            "taps": list(TAPS),
            "hidden_size": bench.layout.hidden_size,
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "rounds": rounds,
            "sizes": sizes(bench),
            "throughput": throughput(bench, rounds),
        }
    for name, size in figures["sizes"].items():
        print(f"{name:16} {size['bytes_per_token']:8,.1f} bytes a token, {size['of_bf16']:.3f} of bf16")
    for name, speed in figures["throughput"].items():
        print(f"{name:16} {speed['tokens_per_second']:8,.0f} tokens/s, {speed['of_forward']:.3f} of the bare forward")
    print(write_result("scale-store", figures, out))


if __name__ == "__main__":
    auto_cli(measure)
