"""Measure drafters against the same decode loop without a draft; write report.json, report.md and report.html.

    python eval/measure.py                                     # the demo's head, and lookup, on held-out prompts
    python eval/measure.py --head DIR --head lookup --prompts questions.jsonl --count 80 --max_new_tokens 256

Exit code 0: the report is written and greedy ids were identical in fp32. 1: written, and they were not. 2: bad input,
nothing written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from eval import identity, protocol
from eval.contenders import BASELINE, LOOKUP, Contender, build, check_name, fits, origin
from eval.decode import Settings as DecodeSettings
from eval.drafters.model import ModelDrafter
from eval.lean import compile_target
from eval.ledger import Ledger
from eval.progress import Steps
from eval.prompts import Prompt, check_lengths, heldout_prompts, read_prompts
from eval.report import write_report
from eval.report.figures import describe_run
from eval.report.made_by import made_by
from eval.report.schema import SCHEMA, Lossless, Report, Run, Settings, TargetInfo
from eval.report.table import print_table
from eval.sampling import Sampling
from heads.checkpoint import weights_sha256
from heads.errors import HeadwayError, run_script, sha256_file
from heads.target import DEFAULT_TARGET, Target

DEMO_HEADS = [BASELINE, LOOKUP, "artifacts/demo/medusa", "artifacts/demo/eagle3"]
EXAMPLES, EXAMPLE_CHARACTERS = 3, 4000


@dataclass(frozen=True)
class Options:
    """What to measure, on what, how.

    Args:
        target: embedded name, local folder or Hub id
        prompts: JSON lines file whose rows hold messages, turns or question (default: the held-out bundled ones)
        count: prompts to measure on
        max_new_tokens: tokens to decode for each
        repeats: times every prompt is decoded
        temperature: 0 is greedy
        top_p: nucleus mass, 1 is off
        top_k: 0 is off
        draft_length: drafts a round (default: what each drafter has)
        dtype: of target and heads; auto is bfloat16 where the device is fast at it, else float32
        device: auto is CUDA where there is one
        out: folder of the report
        seed: of sampling and of the bootstrap
        identity_prompts: prompts of the greedy identity pass in fp32
        identity_tokens: tokens of each
        allow_other_target: measure a head that was trained for another target, with a warning
        compile: run the target's layers as a compiled graph (Llama, Mistral, Qwen2, Qwen3); for baseline and drafts alike
    """

    target: str = DEFAULT_TARGET
    prompts: Path | None = None
    count: int = 8
    max_new_tokens: int = 64
    repeats: int = 2
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_length: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    out: Path = Path("artifacts/demo/report")
    seed: int = 0
    identity_prompts: int = 4
    identity_tokens: int = 32
    allow_other_target: bool = False
    compile: bool = False


def measure(options: Options, heads: Sequence[str], console: Console) -> Report:
    """Run the protocol and write the report. Raises HeadwayError, with nothing written, for bad input."""
    names = [BASELINE, *(name for name in dict.fromkeys(heads) if name != BASELINE)]
    check(options, names)
    console.print(f"loading target '{options.target}'", markup=False, soft_wrap=True)
    target = Target.load(options.target, options.dtype, options.device)
    if options.compile:
        compile_target(target)
    check_heads(names, target, options.allow_other_target, console)
    contenders = [build(name, target, options.draft_length) for name in names]
    chosen, calibration = choose_prompts(options, target, contenders)
    plan = protocol.Plan(
        prompts=[prompt.ids for prompt in chosen],
        calibration=[prompt.ids for prompt in calibration],
        settings=DecodeSettings(options.max_new_tokens, sampling=sampling(options), seed=options.seed),
        repeats=options.repeats,
    )
    proof = plan.prompts[: options.identity_prompts]
    proof_work = identity.identity_work(len(contenders), len(proof), options.identity_tokens)
    with Steps(plan.work(len(contenders)) + proof_work, console) as steps:
        measured = protocol.run(target, contenders, plan, steps)
        lossless = check_texts(target, plan, measured.ledgers)
        steps.heading("greedy identity in fp32")
        exact, exact_contenders = exact_copies(target, contenders, options)
        differs = identity.identity(exact, exact_contenders, proof, options.identity_tokens, steps)
    for name, lines in differs.items():
        lossless[name]["greedy_identical"], lossless[name]["greedy_differs"] = not lines, lines
    report = Report(
        schema=SCHEMA,
        target=describe_target(target),
        protocol=describe_protocol(options, chosen, calibration, len(proof)),
        runs=[describe(contender, options, measured, lossless[contender.name]) for contender in contenders],
        examples=examples(target, chosen, measured.ledgers),
        made_by=made_by({name: made for name in names if (made := origin(name)) is not None})
        | {"weights_sha256": head_weights(contenders)},
    )
    write_report(report, options.out)
    return report


def choose_prompts(
    options: Options, target: Target, contenders: Sequence[Contender]
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to measure on, and others to calibrate on (the same ones where the file has no others)."""
    prompts = read_prompts(options.prompts, target) if options.prompts else heldout_prompts(target)
    chosen, spare = prompts[: options.count], prompts[options.count :]
    calibration = (spare or chosen)[: protocol.CALIBRATION_PROMPTS]
    drafts = max(contender.drafter.most_drafts for contender in contenders)
    tokens = max(options.max_new_tokens, options.identity_tokens)
    check_lengths([*chosen, *calibration], tokens + drafts, target)
    return chosen, calibration


def check(options: Options, names: Sequence[str]) -> None:
    """Raise HeadwayError for options out of range, before anything is loaded; sampling's own are checked by it."""
    for name in ("count", "max_new_tokens", "repeats", "identity_prompts", "identity_tokens", "draft_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise HeadwayError(f"--{name} {value}: give a positive number")
    sampling(options)
    if options.out.exists() and not options.out.is_dir():
        raise HeadwayError(f"{options.out}: is a file; give --out a folder")
    for name in names:
        check_name(name)
    if options.prompts and not options.prompts.is_file():
        raise HeadwayError(f"{options.prompts}: no such file; give --prompts a JSON lines file")


def sampling(options: Options) -> Sampling:
    """The law's settings."""
    return Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)


def check_heads(names: Sequence[str], target: Target, allow: bool, console: Console) -> None:
    """Raise HeadwayError for a head of another target, or only warn where that is allowed."""
    for name in names:
        misfit = fits(name, target)
        if misfit and not allow:
            raise HeadwayError(f"{misfit}; give --target the one it was trained for, or --allow_other_target")
        if misfit:
            console.print(f"warning: {misfit}", markup=False, soft_wrap=True)


def check_texts(target: Target, plan: protocol.Plan, ledgers: dict[str, Ledger]) -> dict[str, Lossless]:
    """Where each run's texts leave the baseline's in the serving dtype; identity in fp32 is filled in later."""
    greedy = plan.settings.sampling.greedy
    return {
        name: Lossless(
            greedy_identical=False,
            greedy_differs=[],
            divergences=identity.divergences(target, plan.prompts, ledger, ledgers[BASELINE]) if greedy else [],
            divergences_checked=greedy,
        )
        for name, ledger in ledgers.items()
    }


def exact_copies(target: Target, contenders: Sequence[Contender], options: Options) -> tuple[Target, list[Contender]]:
    """Target and contenders in fp32; the given ones where they are that already."""
    if str(target.dtype) == "torch.float32":
        return target, list(contenders)
    exact = Target.load(target.name, "float32", str(target.device))
    if options.compile:
        compile_target(exact)
    return exact, [build(contender.name, exact, options.draft_length) for contender in contenders]


def head_weights(contenders: Sequence[Contender]) -> dict[str, str]:
    """Which heads were measured, beyond doubt: the hash of each one's weight file, by the folder that its run names."""
    return {
        contender.head: weights_sha256(contender.head)
        for contender in contenders
        if contender.head is not None and not isinstance(contender.drafter, ModelDrafter)
    }


def describe_target(target: Target) -> TargetInfo:
    """The report's entry of the target."""
    return TargetInfo(
        name=target.name,
        fingerprint=target.fingerprint,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
    )


def describe(contender: Contender, options: Options, measured: protocol.Measured, lossless: Lossless) -> Run:
    """The report's entry of one run."""
    settings = Settings(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        batch_size=1,
        draft_length=contender.drafter.most_drafts,
        tree=None,
    )
    return describe_run(
        contender.drafter.name if contender.controller is None else f"adaptive {contender.drafter.name}",
        contender.head,
        settings,
        measured.ledgers[contender.name],
        measured.ledgers[BASELINE],
        measured.costs[contender.name],
        lossless,
        options.seed,
    )


def describe_protocol(
    options: Options, chosen: Sequence[Prompt], calibration: Sequence[Prompt], proof: int
) -> dict[str, Any]:
    """How it was measured; `asdict` of the options, with what became of them."""
    given = asdict(options) | {"out": str(options.out), "prompts_file": str(options.prompts or "held-out samples")}
    return given | {
        "prompts": len(chosen),
        "prompts_sha256": sha256_file(options.prompts) if options.prompts else None,
        "batch_size": 1,
        "baseline": "the same loop with the empty drafter",
        "order": "all drafters on a prompt before the next prompt; the first one changes with each prompt",
        "calibration": {
            "prompts": len(calibration),
            "tokens": min(protocol.CALIBRATION_TOKENS, options.max_new_tokens),
            "apart": calibration[0] not in chosen,
        },
        "identity": {"prompts": proof, "tokens": options.identity_tokens, "dtype": "float32"},
        "sources": [prompt.source for prompt in chosen],
    }


def examples(target: Target, prompts: Sequence[Prompt], ledgers: dict[str, Ledger]) -> list[dict[str, Any]]:
    """The texts of the first prompts, for readers."""
    found = []
    for number, prompt in enumerate(prompts[:EXAMPLES]):
        outputs = {}
        for name, ledger in ledgers.items():
            ids = next(output.ids for output in ledger.outputs if output.prompt == number)
            outputs[name] = target.tokenizer.decode(ids)[:EXAMPLE_CHARACTERS]
        found.append({"prompt": str(prompt.messages[-1].get("content"))[:EXAMPLE_CHARACTERS], "outputs": outputs})
    return found


def main() -> int:
    """Parse the command line, measure, print the table; see the module for the exit code."""
    parser = ArgumentParser(description="Measure drafters against the same loop without a draft.", exit_on_error=False)
    parser.add_argument(
        "--head",
        action="append",
        help=f"a head's folder, {BASELINE} or {LOOKUP}; may be given again (default: the demo)",
    )
    parser.add_argument(
        "--allow_other_target", action="store_true", help="measure a head trained for another target, with a warning"
    )
    parser.add_argument(
        "--compile", action="store_true", help="run the target's layers compiled, baseline and drafts alike"
    )
    parser.add_class_arguments(Options, skip={"allow_other_target", "compile"})
    try:
        given = parser.parse_args().as_dict()
    except ArgumentError as error:
        raise HeadwayError(f"{error}; see --help") from error
    heads = given.pop("head") or DEMO_HEADS
    console = Console()
    if not console.is_terminal:
        console.width = 140  # of a log file, so that the table's rows stay in one piece
        disable_progress_bar()  # transformers' own, about weights
    report = measure(Options(**given), heads, console)
    print_table(report, console)
    console.print(f"report: {report['protocol']['out']}/report.html", markup=False, soft_wrap=True)
    failed = [line for run in report["runs"] for line in run["lossless"]["greedy_differs"]]
    if failed:
        print(f"error: greedy ids differ in fp32 ({len(failed)} times; {failed[0]}); see the report", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    run_script(main)
