"""Our decode loop against transformers' `generate` on the embedded target: plain, prompt lookup, a draft model.

    python benchmarks/decode.py --prompts spec_bench.question.jsonl      # writes benchmarks/results/decoder-decode.json

Greedy, batch 1, bf16. Six ways decode each prompt before the next one, and who begins moves on with each prompt. The
draft model is the target's first 6 layers under its own norm and head. transformers runs on an untouched model, as its
users have it; `--same_model true` gives it ours, with heads/linear.py's kernels, so that the loops alone differ. Tokens
per second count the whole call; `decode` counts from the first token on, as a streamer is told of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli
from results_file import write_result
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from eval.contenders import Contender, build
from eval.decode import Settings, decode
from eval.ledger import Ledger
from eval.metrics import bootstrap, mean_accepted_length, seconds
from eval.prompts import read_prompts
from heads.errors import HeadwayError, sha256_file
from heads.target import Target, resolve
from heads.truncated import truncate

LAYERS, LOOKUP = 6, 10
PAIRS = {"none": "generate", "lookup": "prompt_lookup_num_tokens", "adaptive:model": "assistant_model"}
Run = Callable[[list[int], int], tuple[int, float]]
"""Decode a prompt to at most so many tokens; returns how many it gave, and when the first one was there."""


class FirstToken(BaseStreamer):
    """Remembers when it was first told of a new token; the first call brings the prompt."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def ours(target: Target, contender: Contender, ledgers: list[Any]) -> Run:
    def run(ids: list[int], tokens: int) -> tuple[int, float]:
        settings, told = Settings(max_new_tokens=tokens), list[float]()

        def listen(*_: object) -> None:
            told.append(time.perf_counter())

        ledger = decode(target, contender.drafter, [ids], settings, listen, contender.controller)
        ledgers.append(ledger)
        return len(ledger.outputs[0].ids), told[0]

    return run


def theirs(model: Any, target: Target, assistant: Any = None, **options: Any) -> Run:
    stops = list(target.eos_ids)

    def run(ids: list[int], tokens: int) -> tuple[int, float]:
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=stops, pad_token_id=stops[0], **options
        )
        ids_1T, first = torch.tensor([ids]), FirstToken()
        mask_1T = torch.ones_like(ids_1T)
        with torch.inference_mode():
            found_1T = model.generate(
                ids_1T, attention_mask=mask_1T, generation_config=config, streamer=first, assistant_model=assistant
            )
        return found_1T.shape[1] - len(ids), first.at

    return run


def timed(run: Run, ids: list[int], tokens: int) -> tuple[int, float, float]:
    """Tokens, seconds of the call, seconds to the first token."""
    started = time.perf_counter()
    count, first = run(ids, tokens)
    return count, time.perf_counter() - started, first - started


def ratio(mine: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Tokens per second of columns (tokens, seconds) over another's, pooled over prompts, with its interval."""

    def statistic(total: np.ndarray) -> np.ndarray:
        return total[..., 0] / total[..., 1] / (total[..., 2] / total[..., 3])

    both = np.concatenate([mine, other], 1)
    return {"ratio": float(statistic(both.sum(0))), "ci95": bootstrap(both, statistic)}


def main(
    prompts: Path,
    count: int = 32,
    max_new_tokens: int = 48,
    dtype: str = "bfloat16",
    same_model: bool = False,
    name: str = "decoder-decode",
) -> None:
    """Decode `count` prompts, evenly spread over the file, in six ways; print and write the ratios."""
    target = Target.load(dtype=dtype, device="cpu")
    rows = read_prompts(prompts, target)
    if count > len(rows):
        raise HeadwayError(f"{prompts}: {len(rows)} rows, --count {count}; lower it")
    chosen = [rows[number * len(rows) // count].ids for number in range(count)]
    with tempfile.TemporaryDirectory() as scratch:
        truncate(target.name, LAYERS, Path(scratch) / "draft")
        contenders = {way: build(f"{way}:{scratch}/draft" if "model" in way else way, target, None) for way in PAIRS}
        assistant = AutoModelForCausalLM.from_pretrained(Path(scratch) / "draft", dtype=target.dtype).eval()
    plain = AutoModelForCausalLM.from_pretrained(resolve(target.name), dtype=target.dtype).eval()
    if same_model:
        plain, assistant = target.model, contenders["adaptive:model"].drafter.model.model  # type: ignore[attr-defined]
    ledgers: dict[str, list[Any]] = {way: [] for way in PAIRS}
    runs = {way: ours(target, contender, ledgers[way]) for way, contender in contenders.items()}
    runs |= {
        "generate": theirs(plain, target),
        "prompt_lookup_num_tokens": theirs(plain, target, prompt_lookup_num_tokens=LOOKUP),
        "assistant_model": theirs(plain, target, assistant),
    }
    for run in runs.values():  # first calls build kernels and grow pools
        run(chosen[0][:64], 8)
    for kept in ledgers.values():
        kept.clear()
    found: dict[str, list[tuple[int, float, float]]] = {way: [] for way in runs}
    names = list(runs)
    for number, ids in enumerate(chosen):
        first = number % len(names)
        for way in [*names[first:], *names[:first]]:
            found[way].append(timed(runs[way], ids, max_new_tokens))
        line = ", ".join(f"{way} {found[way][-1][0] / found[way][-1][1]:.1f}" for way in names)
        print(f"prompt {number + 1} of {count} ({len(ids)} tokens), tokens/s: {line}", flush=True)
    table = {way: np.array(values) for way, values in found.items()}
    decoding = {way: np.stack([t[:, 0] - 1, t[:, 1] - t[:, 2]], 1) for way, t in table.items()}
    figures: dict[str, Any] = {
        "prompts_sha256": sha256_file(prompts), "prompts": count, "max_new_tokens": max_new_tokens, "dtype": dtype,
        "transformers_model": "the same object" if same_model else "untouched", "assistant_layers": LAYERS,
        "tokens_per_second": {way: float(t[:, 0].sum() / t[:, 1].sum()) for way, t in table.items()},
        "decode_tokens_per_second": {way: float(t[:, 0].sum() / t[:, 1].sum()) for way, t in decoding.items()},
        "ratios": {f"{mine} / {other}": {"whole": ratio(table[mine][:, :2], table[other][:, :2]),
                                         "decode": ratio(decoding[mine], decoding[other])}
                   for mine, other in PAIRS.items()},
        "rounds": {way: describe(kept) for way, kept in ledgers.items()},
    }  # fmt: skip
    for pair, values in figures["ratios"].items():
        print(f"{pair}: {values['whole']['ratio']:.2f}x whole call, {values['decode']['ratio']:.2f}x decode")
    write_result(name, figures)


def describe(ledgers: list[Any]) -> dict[str, Any]:
    """Tau and where a round's time goes."""
    whole = Ledger()
    for number, ledger in enumerate(ledgers):
        whole.absorb(ledger, [number])
    count = len(whole.rounds)
    spent = seconds(whole)
    parts = {f"{part}_ms": 1e3 * spent[part] / count for part in ("draft", "verify", "host")}
    return {"tau": mean_accepted_length(whole).micro, "rounds": count} | parts


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
