"""One table of every head: tau, draft cost and decode speedup, on held-out prompts of the training set and on Spec-Bench.

    python benchmarks/table.py --heads '["HEAD", "eagle-tree:HEAD"]' --conversations set/conversations.jsonl \\
        --spec_bench spec_bench.question.jsonl        # writes benchmarks/results/eagle-table.json, an hour on 2 cores

Each part (in domain or Spec-Bench, greedy or at temperature 1) is the protocol of eval/measure.py: drafters and baseline
interleaved per prompt. What is held out of the training set is what `collect.py --held_out` left out of its store.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import auto_cli
from results_file import write_result
from rich.console import Console

from data_prep.conversations import read_conversations, split_heldout
from eval import protocol
from eval.contenders import BASELINE, LOOKUP, Contender, build, origin
from eval.decode import Settings
from eval.ledger import Ledger
from eval.metrics import Costs, mean_accepted_length, predicted_speedup, speedup
from eval.progress import Steps
from eval.prompts import Prompt, check_lengths, read_prompts
from eval.sampling import Sampling
from heads.target import DEFAULT_TARGET, Target

Law = Literal["greedy", "temperature 1"]
LAWS: tuple[Law, ...] = ("greedy", "temperature 1")


@dataclass(frozen=True)
class Set:
    """Prompts to measure on, the label of each, and others to calibrate on."""

    name: str
    prompts: list[Prompt]
    labels: list[str]
    calibration: list[Prompt]


def in_domain_set(conversations: Path, held_out: int, count: int, target: Target) -> Set:
    """The prompts of the first `count` of the `held_out` conversations that no head was trained on."""
    _, heldout = split_heldout(read_conversations(conversations), held_out)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": row.messages}) + "\n" for row in heldout)
        file.flush()
        prompts = read_prompts(Path(file.name), target)
    chosen, spare = prompts[:count], prompts[count:] or prompts
    return Set("in domain", chosen, ["in domain"] * len(chosen), spare[: protocol.CALIBRATION_PROMPTS])


def spec_bench_set(path: Path, per_category: int, target: Target) -> Set:
    """The first `per_category` questions of each of the file's categories, those behind them for calibration."""
    categories = [
        json.loads(line)["category"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    chosen: list[tuple[str, Prompt]] = []
    spare: list[Prompt] = []
    taken: dict[str, int] = defaultdict(int)
    for category, prompt in zip(categories, read_prompts(path, target), strict=True):
        taken[category] += 1
        if taken[category] <= per_category:
            chosen.append((category, prompt))
        else:
            spare.append(prompt)
    labels, prompts = [label for label, _ in chosen], [prompt for _, prompt in chosen]
    return Set("Spec-Bench", prompts, labels, spare[: protocol.CALIBRATION_PROMPTS])


def part_of(ledger: Ledger, prompts: Sequence[int]) -> Ledger:
    """The rows of some prompts."""
    kept = set(prompts)
    return Ledger(
        [row for row in ledger.rounds if row.prompt in kept], [row for row in ledger.outputs if row.prompt in kept]
    )


def figures_of(ledger: Ledger, baseline: Ledger, cost: Costs | None, labels: Sequence[str]) -> dict[str, Any]:
    """One cell of the table."""
    tau, speed = mean_accepted_length(ledger), speedup(ledger, baseline)
    found: dict[str, Any] = {"tau": tau.micro, "tau_ci95": tau.ci95, "rounds": len(ledger.rounds)}
    found |= {"decode_speedup": speed.decode, "decode_speedup_ci95": speed.decode_ci95, "slower_share": speed.slower}
    if cost is not None and tau.micro is not None:
        found |= {"draft_cost": cost.draft, "verify_cost": cost.verify, "break_even_tau": cost.total}
        found["predicted_speedup"] = predicted_speedup(tau.micro, cost)
    by_label: dict[str, list[int]] = defaultdict(list)
    for number, label in enumerate(labels):
        by_label[label].append(number)
    if len(by_label) > 1:
        found["by_category"] = {
            label: {
                "tau": mean_accepted_length(part_of(ledger, numbers)).micro,
                "decode_speedup": speedup(part_of(ledger, numbers), part_of(baseline, numbers)).decode,
            }
            for label, numbers in sorted(by_label.items())
        }
    return found


def measure_set(
    chosen: Set, target: Target, contenders: Sequence[Contender], sampling: Sampling, tokens: int, console: Console
) -> dict[str, Any]:
    """All drafters on one set under one law."""
    check_lengths(
        [*chosen.prompts, *chosen.calibration], tokens + max(each.drafter.most_drafts for each in contenders), target
    )
    plan = protocol.Plan(
        prompts=[prompt.ids for prompt in chosen.prompts],
        calibration=[prompt.ids for prompt in chosen.calibration],
        settings=Settings(tokens, sampling=sampling),
        repeats=1,
    )
    with Steps(plan.work(len(contenders)), console) as steps:
        measured = protocol.run(target, contenders, plan, steps)
    baseline = measured.ledgers[BASELINE]
    return {
        each.name: figures_of(measured.ledgers[each.name], baseline, measured.costs[each.name], chosen.labels)
        for each in contenders
    }


def measure(
    heads: list[str],
    conversations: Path,
    spec_bench: Path | None = None,
    target: str = DEFAULT_TARGET,
    dtype: str = "bfloat16",
    held_out: int = 64,
    count: int = 64,
    per_category: int = 3,
    tokens: int = 64,
    laws: Sequence[Law] = LAWS,
    result: str = "eagle-table",
) -> None:
    """Measure all drafters on both sets under the laws asked for.

    Args:
        heads: heads as `eval/measure.py --head` takes them; no draft and lookup are always there
        conversations: what the store of the heads was collected from
        spec_bench: Spec-Bench's question.jsonl; null measures in domain alone
        target: the heads' target
        dtype: of target and heads
        held_out: as it was given to collect.py
        count: held-out conversations to measure on
        per_category: questions of each category of Spec-Bench
        tokens: of each answer at most
        laws: greedy, temperature 1, or both
        result: name of the file in benchmarks/results/
    """
    console = Console(width=140)
    model = Target.load(target, dtype)
    contenders = [build(name, model, None) for name in (BASELINE, LOOKUP, *heads)]
    sets = [in_domain_set(conversations, held_out, count, model)]
    if spec_bench is not None:
        sets.append(spec_bench_set(spec_bench, per_category, model))
    parts = {}
    for chosen in sets:
        for law in laws:
            sampling = Sampling(temperature=0.0 if law == "greedy" else 1.0)
            found = measure_set(chosen, model, contenders, sampling, tokens, console)
            parts[f"{chosen.name}, {law}"] = {"prompts": len(chosen.prompts), "drafters": found}
            for name, cell in found.items():
                line = f"{chosen.name}, {law}: {name}: tau {cell['tau']:.3f}, decode {cell['decode_speedup']:.3f}x"
                console.print(line, markup=False, soft_wrap=True)
    made = {name: manifest for name in heads if (manifest := origin(name)) is not None}
    write_result(result, {"dtype": dtype, "tokens": tokens, "parts": parts, "heads": made})


if __name__ == "__main__":
    auto_cli(measure, as_positional=False)
