"""How fast the target answers prompts: data_prep/regenerate.py in process, transformers' `generate`, and a vLLM server.

    python benchmarks/regenerate.py                    # writes benchmarks/results/data-regenerate.json, ~6 minutes
    python benchmarks/regenerate.py --vllm float32     # writes data-regenerate-vllm-float32.json, ~6 minutes

Greedy answers of the embedded target to the bundled samples' first user turns in fp32, contenders alternating in one
run. `generate` gets as many rows a batch, prompts of about the same length together, left-padded; once with the model as
transformers loads it, once with Headway's linears. Tokens are those up to the stop token. What Headway does to an answer
(the check that its text gives its ids back, the work file) is in its time. A server's start is not.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from vllm_server import PACKAGE, vllm_server

from data_prep.answer_local import answer_locally
from data_prep.answering import Run
from data_prep.conversations import SAMPLES, prompt_ids, read_conversations
from data_prep.journal import Journal
from data_prep.plan import describe
from data_prep.regenerate import Settings, open_dialogues
from heads.embedded import embedded_folder
from heads.target import Target

Answers = dict[str, list[int]]  # id -> what was written, the stop token included


class Bench:
    """The prompts of a run, and how each contender answers them."""

    def __init__(self, target: Target, count: int, tokens: int, rows: int, folder: Path) -> None:
        self.target, self.tokens, self.rows, self.folder = target, tokens, rows, folder
        conversations = read_conversations(SAMPLES)[:count]
        self.prompts = {each.id: prompt_ids(self.target.tokenizer, each.messages[:1]) for each in conversations}
        lines = [json.dumps({"id": each.id, "text": each.messages[0]["content"]}) for each in conversations]
        (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def regenerate(self, server: str = "") -> Answers:
        """By data_prep/regenerate.py, in this process or at a server."""
        settings = Settings(
            prompts=self.folder / "prompts.jsonl",
            out=self.folder / "out.jsonl",
            server=server,
            max_new_tokens=self.tokens,
            batch_size=self.rows,
            concurrency=self.rows,
            dtype="float32",
        )
        source = describe(settings.target, settings.dtype, self.target.device)
        run = Run(settings, source, open_dialogues(settings, source))
        run.connect()
        with Journal(self.folder / "out.work", run.header()) as journal:
            run.resume(journal)
            if server:
                run.answer()
            else:
                answer_locally(run.dialogues, run.take, self.target, self.rows, self.tokens, None, run.seed)
            journal.remove()
        return {dialogue.id: dialogue.token_ids[0] for dialogue in run.dialogues if dialogue.token_ids}

    def generate(self, model: Any) -> Answers:
        """By transformers' own loop."""
        stop = self.target.eos_ids[0]
        config = GenerationConfig(max_new_tokens=self.tokens, do_sample=False, eos_token_id=stop, pad_token_id=stop)
        answers = {}
        for ids in self._batches():
            prompts = [self.prompts[identity] for identity in ids]
            longest = max(map(len, prompts))
            ids_BT = torch.tensor([[stop] * (longest - len(prompt)) + prompt for prompt in prompts])
            mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            with torch.inference_mode():
                found = model.generate(ids_BT, attention_mask=mask_BT, generation_config=config)[:, longest:].tolist()
            for identity, row in zip(ids, found, strict=True):
                answers[identity] = row[: row.index(stop) + 1] if stop in row else row
        return answers

    def _batches(self) -> Iterator[list[str]]:
        ordered = sorted(self.prompts, key=lambda identity: len(self.prompts[identity]))
        for first in range(0, len(ordered), self.rows):
            yield ordered[first : first + self.rows]


def alternate(contenders: dict[str, Callable[[Bench], Answers]], bench: Bench, rounds: int) -> dict[str, Any]:
    """Tokens per second of each, the order turning from round to round; how many answers are the first contender's."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, Answers] = {}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
            started = time.perf_counter()
            answers[name] = contenders[name](bench)
            seconds = time.perf_counter() - started
            rates[name].append(sum(map(len, answers[name].values())) / seconds)
            print(f"{name}: {rates[name][-1]:.0f} tokens/s ({seconds:.0f} s)", flush=True)
    first = next(iter(contenders))
    return {
        name: {
            "tokens_per_second": statistics.median(rates[name]),
            "each_round": rates[name],
            "answers": len(answers[name]),
            "same_as_first": sum(answers[first].get(key) == ids for key, ids in answers[name].items()),
            "first_over_it": statistics.median(ours / its for ours, its in zip(rates[first], rates[name], strict=True)),
        }
        for name in contenders
    }


def measure(
    count: int = 96,
    tokens: int = 128,
    rows: int = 32,
    rounds: int = 2,
    vllm: Literal["", "float32", "bfloat16"] = "",
    eager: bool = False,
) -> dict[str, Any]:
    """Figures of `count` prompts. `vllm` compares with a server of that dtype in place of `generate`; `eager` starts it
    without its compiler."""
    target = Target.load(dtype="float32")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        contenders: dict[str, Callable[[Bench], Answers]] = {"regenerate, in process": Bench.regenerate}
        if vllm:
            options = ["--enforce-eager"] if eager else []
            server = vllm_server(embedded_folder(), Path(scratch) / "server.log", vllm, *options)
            stack.enter_context(server)
            contenders[f"regenerate, {PACKAGE} {vllm}"] = partial(Bench.regenerate, server=f"{server.url}/v1")
        else:
            plain = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
            contenders["generate"] = partial(Bench.generate, model=plain)
            contenders["generate, Headway's linears"] = partial(Bench.generate, model=target.model)
        print("warming up", flush=True)
        alternate(contenders, Bench(target, rows, 4, rows, Path(scratch)), 1)
        bench = Bench(target, count, tokens, rows, Path(scratch))
        figures = alternate(contenders, bench, rounds)
    prompts = sum(map(len, bench.prompts.values()))
    sizes = {"prompts": count, "prompt_tokens": prompts, "max_new_tokens": tokens, "rows": rows, "rounds": rounds}
    return sizes | {"dtype": "float32", "contenders": figures}


if __name__ == "__main__":
    import sys

    from jsonargparse import auto_cli
    from results_file import write_result  # beside this file

    name = "data-regenerate"
    if "--vllm" in sys.argv:
        name += f"-vllm-{sys.argv[sys.argv.index('--vllm') + 1]}"
    write_result(name, auto_cli(measure))
