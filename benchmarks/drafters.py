"""Greedy identity of every drafter on the embedded target, fp32: batches of 1, 2 and 5, padded on either side, shuffled.

    python benchmarks/drafters.py --heads '["DIR", "eagle-tree:DIR"]'     # writes benchmarks/results/decoder-identity.json

The reference is transformers' `generate` of each prompt alone; the drafters go through `SpeculativeDecoder.generate`. Those
that need no training are always there: none, lookup, suffix, lookahead, and the target's first 6 layers as a draft model.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from eval.contenders import build
from eval.metrics import mean_accepted_length
from eval.prompts import heldout_prompts
from eval.speculative import SpeculativeDecoder
from heads.target import Target
from heads.truncated import truncate

PROMPTS, TOKENS, LAYERS = 5, 40, 6
FREE = ("none", "lookup", "suffix", "lookahead", "adaptive:lookup")


def padded(rows: Sequence[list[int]], pad: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask [B, T] of ragged rows."""
    longest = max(map(len, rows))
    fill = [[pad] * (longest - len(row)) for row in rows]
    ids = [more + row if left else row + more for row, more in zip(rows, fill, strict=True)]
    kept = [[0] * len(more) + [1] * len(row) if left else [1] * len(row) + [0] * len(more) for row, more in zip(rows, fill, strict=True)]  # fmt: skip
    return torch.tensor(ids), torch.tensor(kept)


def measure(heads: Sequence[str] = ()) -> dict[str, Any]:
    """Per drafter: how many of the answers are `generate`'s, of how many, and its tau."""
    target = Target.load(dtype="float32")
    prompts = [prompt.ids for prompt in heldout_prompts(target)[:PROMPTS]]
    stop = target.eos_ids[0]
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=stop, pad_token_id=stop)
    texts = []
    for ids in prompts:
        ids_1T = torch.tensor([ids])
        found_1T = target.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=config)
        texts.append(found_1T[0, len(ids) :].tolist())
    shuffled = random.Random(0).sample(range(PROMPTS), PROMPTS)
    calls = [([number], True) for number in range(PROMPTS)]
    calls += [([0, 1], True), ([2, 3], False), (list(range(PROMPTS)), True), (shuffled, False)]
    figures: dict[str, Any] = {"prompts": PROMPTS, "tokens": TOKENS, "dtype": "float32", "runs": {}}
    with tempfile.TemporaryDirectory() as scratch:
        truncate(target.name, LAYERS, Path(scratch) / "draft")
        for name in (*FREE, f"model:{scratch}/draft", *heads):
            contender = build(name, target, None)
            decoder = SpeculativeDecoder(target, contender.drafter, contender.controller)
            right, answers, taus = 0, 0, []
            for numbers, left in calls:
                ids_BT, mask_BT = padded([prompts[number] for number in numbers], stop, left)
                found_BT = decoder.generate(ids_BT, config, attention_mask=mask_BT)[:, ids_BT.shape[1] :].tolist()
                for number, found in zip(numbers, found_BT, strict=True):
                    length = len(texts[number])
                    right += found[:length] == texts[number] and set(found[length:]) <= {stop}
                    answers += 1
                taus.append(mean_accepted_length(decoder.ledger).micro)
            label = ("adaptive " if contender.controller else "") + contender.drafter.name
            figures["runs"][label] = {"identical": right, "answers": answers, "tau_batch_5": taus[-2]}
            print(f"{label}: {figures['runs'][label]}", flush=True)
    return figures


if __name__ == "__main__":
    from jsonargparse import auto_cli
    from results_file import write_result  # beside this file; the slow test imports only `measure`

    write_result("decoder-identity", auto_cli(measure, as_positional=False))
