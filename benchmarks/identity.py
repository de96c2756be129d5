"""Greedy identity of 64 held-out answers of 128 tokens on the embedded target, fp32, in four ways.

    python benchmarks/identity.py [--count 16]     # after `make demo`; writes benchmarks/results/line-identity.json, ~15 minutes

transformers' `generate` over batches of 32 left-padded rows, and the baseline, lookup and Medusa runs of the decode loop
over batches of 32 ragged rows. `make slow` asserts that all ids are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from data_prep.conversations import SAMPLES, prompt_ids, read_conversations, split_heldout
from eval.contenders import build
from eval.decode import Settings, decode
from eval.ledger import Ledger
from eval.metrics import mean_accepted_length
from heads.errors import HeadwayError
from heads.target import Target

HEAD = Path(__file__).resolve().parents[1] / "artifacts" / "demo" / "medusa"
PROMPTS, TOKENS, ROWS = 64, 128, 32


def generate(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy answers to a batch, cut behind the stop token."""
    longest, stop = max(map(len, prompts)), target.eos_ids[0]
    ids_BT = torch.tensor([[stop] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=stop, pad_token_id=stop)
    found_BT = target.model.generate(
        ids_BT.to(target.device), attention_mask=mask_BT.to(target.device), generation_config=config
    )
    answers = found_BT[:, longest:].tolist()
    return [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in answers]


def measure(count: int = PROMPTS, head: Path = HEAD) -> dict[str, Any]:
    """Per run: how many of the answers are `generate`'s, which are not, and tau. Raises HeadwayError without a head."""
    if not (head / "manifest.json").is_file():
        raise HeadwayError(f"{head}: no head there; run `make demo` first")
    target = Target.load(dtype="float32")
    _, heldout = split_heldout(read_conversations(SAMPLES), PROMPTS)
    prompts = [prompt_ids(target.tokenizer, conversation.messages[:1]) for conversation in heldout[:count]]
    generated = [ids for first in range(0, count, ROWS) for ids in generate(target, prompts[first : first + ROWS])]
    print("generate: done", flush=True)
    figures: dict[str, Any] = {"prompts": count, "tokens": TOKENS, "rows": ROWS, "dtype": "float32", "runs": {}}
    for name in ("none", "lookup", str(head)):
        drafter = build(name, target, None).drafter
        ledger = Ledger()
        for first in range(0, count, ROWS):
            numbers = range(first, min(first + ROWS, count))
            part = decode(target, drafter, prompts[first : first + ROWS], Settings(max_new_tokens=TOKENS))
            ledger.absorb(part, list(numbers))
        ledger.check()
        different = [output.prompt for output in ledger.outputs if output.ids != generated[output.prompt]]
        figures["runs"][drafter.name] = {
            "identical": count - len(different),
            "different_prompts": different,
            "tau": mean_accepted_length(ledger).micro,
        }
        print(f"{drafter.name}: {figures['runs'][drafter.name]}", flush=True)
    return figures


if __name__ == "__main__":
    from jsonargparse import auto_cli
    from results_file import write_result  # beside this file; the slow test imports only `measure`

    write_result("line-identity", auto_cli(measure))
