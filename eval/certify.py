"""Certify that drafting changes no word: prove the verification rules, and with a head test it in the real loop.

    python eval/certify.py --out DIR                      # enumeration and mutants, under half a minute
    python eval/certify.py --head DIR --out DIR           # chi-square through the loop and greedy identity as well

Writes DIR/certificate.json. Exit code 0: everything held. 1: written, and something did not. 2: bad input, nothing
written.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from eval import chi_square, coin_grid, identity
from eval.chi_square import BigramDrafter, Subject
from eval.contenders import BASELINE, build, check_name, fits
from eval.decode import Settings, decode
from eval.enumeration import deviations, random_cases
from eval.experiments import CHAIN, LOSSLESS, PROCESSED, TYPICAL
from eval.ledger import Ledger
from eval.mutants import CASES, MUTANTS
from eval.prompts import Prompt, check_lengths, heldout_prompts, read_prompts
from heads import load_head
from heads.checkpoint import Head, weights_sha256
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, atomic_write_text, run_script
from heads.target import DEFAULT_TARGET, Target, auto_dtype

SCHEMA, FILE = 1, "certificate.json"
EXACT, KILLED = 1e-12, 1e-4
RULE_CASES = 100  # targets and drafts that every rule is enumerated on
FAULT = 0.01  # total variation that chi-square must notice


class Divergence(TypedDict):
    """A prompt's first token that differs from the baseline's, and the target's top-2 margin there."""

    prompt: int
    position: int
    margin: float


class Certificate(TypedDict):
    """certificate.json, schema 1. Other tools read it: keys may be added, none may change its meaning.

    rules       {name, lossless, max_deviation}: total variation between enumerated and target's law, worst case.
    mutants     {name, killed, max_deviation}: the same for rules that are wrong on purpose.
    chi_square  {drafter, settings, p_value, draws}: of outputs decoded from a tiny random target.
    greedy      {dtype, prompts, identical, divergences}: the head's greedy ids against the baseline's on so many
                prompts; first in float32, where they must be identical, then in the serving dtype if it is another.
    head        {weights_sha256}: which head this is about; None where the rules alone were proved.
    target      {name, fingerprint}: of that head; None likewise.
    failed      what did not hold, a line each.
    """

    schema: int
    head: dict[str, str] | None
    target: dict[str, str] | None
    rules: list[dict[str, Any]]
    mutants: list[dict[str, Any]]
    chi_square: list[dict[str, Any]]
    greedy: list[dict[str, Any]]
    failed: list[str]


@dataclass(frozen=True)
class Options:
    """What to certify.

    Args:
        out: folder of certificate.json
        head: a head's folder; without one the rules alone are proved
        prompts: JSON lines file for greedy identity (default: the held-out bundled ones)
        target: embedded name, local folder or Hub id of the head's target
        dtype: serving dtype that greedy identity is looked at in beside float32; auto as in measure.py
        device: auto is CUDA where there is one
        count: prompts of greedy identity
        max_new_tokens: tokens to decode for each
        draws: decodes for each chi-square test
        seed: of cases and draws
    """

    out: Path
    head: Path | None = None
    prompts: Path | None = None
    target: str = DEFAULT_TARGET
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    count: int = 8
    max_new_tokens: int = 64
    draws: int = 4000
    seed: int = 0


# --- the rules ----------------------------------------------------------------------------------------------------------


def prove_rules(seed: int) -> list[dict[str, Any]]:
    """Enumerate every rule on every kind of draft."""

    def entry(name: str, lossless: bool, deviation_R: torch.Tensor) -> dict[str, Any]:
        return {"name": name, "lossless": lossless, "max_deviation": float(deviation_R.max())}

    found = []
    for experiment, prepare in (*((plain, None) for plain in LOSSLESS), *PROCESSED):
        cases = random_cases(RULE_CASES, experiment.vocab, experiment.shape.max_depth, seed)
        found.append(entry(experiment.name, True, deviations(experiment, prepare(cases) if prepare else cases)))
    grid_R = coin_grid.grid_deviations(coin_grid.grid_cases(RULE_CASES, seed))
    found.append(entry(coin_grid.EXPERIMENT.name, True, grid_R))
    cases = random_cases(RULE_CASES, TYPICAL.vocab, TYPICAL.shape.max_depth, seed)
    found.append(entry(TYPICAL.name, False, deviations(TYPICAL, cases)))
    return found


def kill_mutants(seed: int) -> list[dict[str, Any]]:
    """Run every wrong rule through the same enumeration."""
    found = []
    for mutant in MUTANTS:
        worst = float(mutant.deviations(CASES, seed).max())
        found.append({"name": mutant.name, "killed": worst > KILLED, "max_deviation": worst})
    return found


# --- the loop -----------------------------------------------------------------------------------------------------------


def test_loop(head: Head, draws: int, seed: int, console: Console) -> list[dict[str, Any]]:
    """Chi-square tests of the decode loop on a tiny random target; each p-value is printed as it comes."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        target = chi_square.tiny_target(Path(folder), seed)
        for subject, names in chi_square.subjects(head, target, seed):
            for name in names:
                # Seeds apart, or drafts without sampling would give one and the same text for every drafter.
                first_seed = seed + len(found) * draws
                p_value = chi_square.test(target, subject, chi_square.SETTINGS[name], draws, first_seed)
                found.append({"drafter": subject.name, "settings": name, "p_value": p_value, "draws": draws})
                console.print(f"  {subject.name}, {name}: p = {p_value:.3f}", markup=False, highlight=False)
    return found


def plant_fault(seed: int) -> dict[str, Any]:
    """Would the chi-square test notice laws that are off by 0.01? An entry of the mutants."""
    sampling = chi_square.SETTINGS["temperature 1"]
    with tempfile.TemporaryDirectory() as folder:
        target = chi_square.tiny_target(Path(folder), seed)
        rare = int(chi_square.exact_law(target, sampling, 1).argmin())
        subject = Subject("sampled chain", BigramDrafter(target, CHAIN))
        with chi_square.planted_fault(rare, FAULT):
            found_S = chi_square.counts(target, subject, sampling, chi_square.FAULT_DRAWS, seed, tokens=3)
        p_value = chi_square.p_value(found_S, chi_square.exact_law(target, sampling, 3))
    name = f"law off by {FAULT} in the decode loop, {chi_square.FAULT_DRAWS} draws: p = {p_value:.1e}"
    return {"name": name, "killed": p_value < chi_square.SIGNIFICANT, "max_deviation": FAULT}


def greedy_identity(options: Options, target: Target, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Greedy ids of the head against the baseline's in the target's dtype, prompt by prompt."""
    settings = Settings(max_new_tokens=options.max_new_tokens)
    ids = [prompt.ids for prompt in prompts]

    def run(name: str) -> Ledger:
        ledger, contender = Ledger(), build(name, target, None)
        for number, prompt in enumerate(ids):
            ledger.absorb(
                decode(target, contender.drafter, [prompt], settings, controller=contender.controller), [number]
            )
        return ledger

    found = identity.divergences(target, ids, run(str(options.head)), run(BASELINE))
    dtype = str(target.dtype).removeprefix("torch.")
    return {"dtype": dtype, "prompts": len(ids), "identical": not found, "divergences": found}


def head_inputs(options: Options) -> tuple[Target, list[Prompt]]:
    """The head's target in float32 and the prompts, checked before any work. Raises HeadwayError where they misfit."""
    target = Target.load(options.target, "float32", options.device)
    if misfit := fits(str(options.head), target):
        raise HeadwayError(f"{misfit}; give --target the one it was trained for")
    prompts = read_prompts(options.prompts, target) if options.prompts else heldout_prompts(target)
    chosen = prompts[: options.count]
    drafts = build(str(options.head), target, None).drafter.most_drafts
    check_lengths(chosen, options.max_new_tokens + drafts, target)
    return target, chosen


# --- the certificate ----------------------------------------------------------------------------------------------------


def check(options: Options) -> Head | None:
    """Raise HeadwayError for what cannot be certified, before any work; returns the loaded head."""
    for name in ("count", "max_new_tokens", "draws"):
        if getattr(options, name) < 1:
            raise HeadwayError(f"--{name} {getattr(options, name)}: give a positive number")
    if options.out.exists() and not options.out.is_dir():
        raise HeadwayError(f"{options.out}: is a file; give --out a folder")
    if options.head is None:
        if options.prompts is not None:
            raise HeadwayError("--prompts is for greedy identity, which needs a head; give --head too")
        return None
    check_name(str(options.head))
    if options.prompts is not None and not options.prompts.is_file():
        raise HeadwayError(f"{options.prompts}: no such file; give --prompts a JSON lines file")
    return load_head(options.head)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def certify(options: Options, console: Console) -> Certificate:
    """Run what the options ask for. Raises HeadwayError for bad input."""
    head = check(options)

    def timed(heading: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        with console.status(heading):
            found = work()
        console.print(f"{heading}: {time.perf_counter() - started:.1f} s", highlight=False)
        return found

    # Bad prompts and a head that does not fit are refused here, not after minutes of proving.
    exact, prompts = head_inputs(options) if head is not None else (None, [])
    tests, greedy = [], []
    with one_thread():
        rules = timed("enumeration of the rules", partial(prove_rules, options.seed))
        mutants = timed("mutants", partial(kill_mutants, options.seed))
        if head is not None:
            tests = timed("chi-square through the loop", partial(test_loop, head, options.draws, options.seed, console))
            mutants.append(timed("planted fault", partial(plant_fault, options.seed)))
    if exact is not None:
        greedy.append(timed("greedy identity in float32", partial(greedy_identity, options, exact, prompts)))
        serving = auto_dtype(options.dtype, exact.device)
        if serving != exact.dtype:
            name = str(serving).removeprefix("torch.")
            target = Target.load(options.target, name, options.device)
            greedy.append(timed(f"greedy identity in {name}", partial(greedy_identity, options, target, prompts)))
    certificate = Certificate(
        schema=SCHEMA,
        head=None if options.head is None else {"weights_sha256": weights_sha256(options.head)},
        target=None if exact is None else {"name": exact.name, "fingerprint": exact.fingerprint},
        rules=rules,
        mutants=mutants,
        chi_square=tests,
        greedy=greedy,
        failed=[],
    )
    certificate["failed"] = failures(certificate)
    return certificate


def failures(certificate: Certificate) -> list[str]:
    """What did not hold, a line each. Divergences in the serving dtype are reported, not failed."""
    found = [
        f"rule '{rule['name']}' is off by {rule['max_deviation']:.1e}"
        for rule in certificate["rules"]
        if rule["lossless"] and rule["max_deviation"] > EXACT
    ]
    found += [f"mutant '{mutant['name']}' survived" for mutant in certificate["mutants"] if not mutant["killed"]]
    found += [
        f"chi-square of {test['drafter']}, {test['settings']}: p = {test['p_value']:.1e}"
        for test in certificate["chi_square"]
        if test["p_value"] < chi_square.SIGNIFICANT
    ]
    found += [
        f"greedy ids differ in float32 on {len(run['divergences'])} of {run['prompts']} prompts"
        for run in certificate["greedy"]
        if run["dtype"] == "float32" and not run["identical"]
    ]
    return found


def print_certificate(certificate: Certificate, console: Console) -> None:
    """The table people read."""
    table = Table("what", "result", "figure", title="certificate")
    for rule in certificate["rules"]:
        exact = rule["max_deviation"] <= EXACT
        verdict = ("exact" if exact else "NOT EXACT") if rule["lossless"] else "lossy, by design"
        table.add_row(rule["name"], verdict, f"deviation {rule['max_deviation']:.1e}")
    table.add_section()
    for mutant in certificate["mutants"]:
        verdict = "killed" if mutant["killed"] else "SURVIVED"
        table.add_row(f"mutant: {mutant['name']}", verdict, f"deviation {mutant['max_deviation']:.1e}")
    table.add_section()
    for test in certificate["chi_square"]:
        fine = "fits" if test["p_value"] >= chi_square.SIGNIFICANT else "DOES NOT FIT"
        name = f"chi-square: {test['drafter']}, {test['settings']}"
        table.add_row(name, fine, f"p {test['p_value']:.3f}, {test['draws']} draws")
    table.add_section()
    for run in certificate["greedy"]:
        name = f"greedy ids in {run['dtype']}, {run['prompts']} prompts"
        verdict = "identical" if run["identical"] else f"{len(run['divergences'])} part"
        margins = ", ".join(f"{each['margin']:.3g}" for each in run["divergences"])
        table.add_row(name, verdict, f"margins {margins}" if margins else "")
    console.print(table)


def main() -> int:
    """Parse the command line, certify, print and write; see the module for the exit code."""
    parser = ArgumentParser(description="Prove that drafting does not change the target's text.", exit_on_error=False)
    parser.add_class_arguments(Options)
    options = Options(**parse_arguments(parser).as_dict())
    console = Console()
    if not console.is_terminal:
        disable_progress_bar()  # transformers' own, about weights
    certificate = certify(options, console)
    print_certificate(certificate, console)
    options.out.mkdir(parents=True, exist_ok=True)
    atomic_write_text(options.out / FILE, json.dumps(certificate, indent=1, allow_nan=False) + "\n")
    console.print(f"certificate: {options.out / FILE}", markup=False, highlight=False)
    for line in certificate["failed"]:
        console.print(f"failed: {line}", style="red", markup=False)
    return 1 if certificate["failed"] else 0


if __name__ == "__main__":
    run_script(main)
