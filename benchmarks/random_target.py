"""Decoding an 8B-sized target: none, lookup and Medusa heads against transformers' `generate`, by the ledger.

    python benchmarks/random_target.py                          # Llama-3.1-8B's shape, bf16, on CUDA; 3 minutes
    python benchmarks/random_target.py --size tiny --device cpu # the same code in seconds, to try it

The weights are random and made on the device, so nothing is fetched. Costs (milliseconds a pass, tokens/s) are those of
any model of this shape. Acceptance is not: a random model falls into loops, which lookup drafts well, and random Medusa
heads are hardly ever right; with them only the cost of a round means something.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from results_file import RESULTS, write_result
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval import identity, metrics, protocol
from eval.clock import Clock
from eval.contenders import Contender
from eval.decode import Settings
from eval.drafters.lookup import LookupDrafter
from eval.drafters.medusa import MedusaDrafter
from eval.drafters.none import NoDrafter
from eval.progress import Steps
from heads import MedusaHead
from heads.errors import run_script
from heads.medusa import MedusaConfig
from heads.target import Target, auto_device

SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
}
PROMPTS, PROMPT_TOKENS = 4, 200


def random_target(size: str, dtype: torch.dtype, device: torch.device, folder: Path) -> Target:
    """A Llama of random weights, made on `device`, under a tokenizer that only names its ids."""
    config = LlamaConfig(**SIZES[size], eos_token_id=None, bos_token_id=None, pad_token_id=0)
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "<|end|>": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model.eval().requires_grad_(False), f"random-{size}", folder)


def random_medusa(target: Target) -> MedusaHead:
    """Four Medusa heads over a draft vocabulary of up to 8,192 tokens: draft id i is target id i."""
    draft = min(8192, target.vocab_size // 2)
    with torch.device(target.device):
        head = MedusaHead(MedusaConfig(target.hidden_size, target.vocab_size, draft_vocab_size=draft, num_heads=4))
        head.lm_head.weight.data.normal_(std=0.02)
        head.t2d[:draft] = True
    return head.to(target.dtype).eval()


def prompts(vocab_size: int) -> list[list[int]]:
    """Random ids, the second half a copy of the first, so that lookup has something to find."""
    source = torch.Generator().manual_seed(1)
    halves = torch.randint(
        2, vocab_size, (PROMPTS + protocol.CALIBRATION_PROMPTS, PROMPT_TOKENS // 2), generator=source
    )
    return [[*half, *half] for half in halves.tolist()]


def generate_speed(target: Target, ids: list[list[int]], tokens: int) -> float:
    """Tokens per second of transformers' greedy `generate`, prefill included, after one warm-up."""
    clock = Clock(target.device)
    identity.generate(target, ids[0], 8)
    started = clock.now()
    made = sum(len(identity.generate(target, prompt, tokens)) for prompt in ids)
    return made / (clock.now() - started)


def measure(target: Target, tokens: int, repeats: int) -> dict[str, Any]:
    """Figures of every drafter, from ledgers made by the same protocol as eval/measure.py."""
    contenders = [
        Contender("none", NoDrafter(), None),
        Contender("lookup", LookupDrafter(), None),
        Contender("medusa", MedusaDrafter(random_medusa(target)), None),
    ]
    ids = prompts(target.vocab_size)
    plan = protocol.Plan(ids[:PROMPTS], ids[PROMPTS:], Settings(max_new_tokens=tokens, stop_ids=()), repeats)
    with Steps(plan.work(len(contenders)), Console()) as steps:
        measured = protocol.run(target, contenders, plan, steps)
    baseline = measured.ledgers["none"]
    plain = generate_speed(target, ids[:PROMPTS], tokens)
    figures: dict[str, Any] = {"generate_tokens_per_s": plain}
    for name, ledger in measured.ledgers.items():
        seconds, rounds = metrics.seconds(ledger), len(ledger.rounds)
        total = sum(seconds.values())
        cost = measured.costs[name]
        figures[name] = {
            "tau": metrics.mean_accepted_length(ledger).micro,
            "decode_speedup": metrics.speedup(ledger, baseline).decode,
            "break_even_tau": cost.total if cost else None,
            "tokens_per_s": sum(len(output.ids) for output in ledger.outputs) / total,
            "ms_per_round": {part: 1e3 * seconds[part] / rounds for part in ("draft", "verify", "host")},
            "ms_per_prefill": 1e3 * seconds["prefill"] / len(ledger.outputs),
            "divergences": identity.divergences(target, plan.prompts, ledger, baseline),
        }
    figures["baseline_over_generate"] = figures["none"]["tokens_per_s"] / plain
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device, started = auto_device(options.device), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = random_target(options.size, getattr(torch, options.dtype), device, Path(folder))
        figures = measure(target, options.tokens, options.repeats)
    figures["parameters"] = sum(parameter.numel() for parameter in target.model.parameters())
    figures["dtype"], figures["device"] = options.dtype, str(device)
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    figures["seconds"] = time.perf_counter() - started
    print(f"written: {write_result(f'random-target-{options.size}', figures, options.out)}")


if __name__ == "__main__":
    run_script(main)
