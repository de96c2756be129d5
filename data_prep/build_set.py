"""A training set of about so many answer tokens, from self-synthesis and from prompts of other sources.

    python data_prep/build_set.py --out DIR --tokens 1000000
    python data_prep/build_set.py --out DIR --source gsm8k.train.jsonl tasks.jsonl --deny benchmark.jsonl [--server URL]

It works in rounds: each answers as many prompts as the rest needs at the mean length of the answers so far, the first a
tenth of them. What is finished stays; run it again to go on, or with more --tokens to enlarge the set. DIR then holds
conversations.jsonl and a manifest.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from data_prep import regenerate, synthesize
from data_prep.pools import SYNTHETIC, Pools, Turns
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, atomic_write_text, run_script, sha256_file
from heads.target import DEFAULT_TARGET, fingerprint, resolve

FIRST_SHARE = 0.1  # of the tokens, in the round that finds out how long answers are
ENOUGH = 0.99  # of the tokens: for the rest a round of a few long answers would take its time
FIRST_MEAN = 150.0  # tokens of an answer, until some have been counted
PASSED_ON = ("target", "server", "model", "max_new_tokens", "seed", "batch_size", "concurrency", "dtype", "device")


@dataclass(frozen=True)
class Settings:
    """What to build, and who answers.

    Args:
        out: folder of the set; a run that was killed goes on there
        source: files, folders or Hub names with prompts to train on, in any format of data_prep/recognise.py
        deny: the same with prompts to measure on, which are left out; the bundled held-out prompts always are
        tokens: answer tokens to have, about
        synthetic: share of them that answers the target's own user turns; the sources share the rest evenly, and what
            they are too small for goes to self-synthesis too
        target: embedded name, local folder or Hub id
        server: base URLs of OpenAI-compatible servers that answer, separated by commas; empty: answer in this process
        model: the name under which the servers serve the target
        max_new_tokens: an answer that has not ended by then is cut
        seed: of the invented user turns
        batch_size: rows of a forward pass in this process
        concurrency: answers in flight at each server
        dtype: of the target in this process; auto is bfloat16 where the device is fast at it, else float32
        device: of the target in this process: auto, cpu, cuda, cuda:1 ...
    """

    out: Path
    source: list[str] = field(default_factory=list)
    deny: list[str] = field(default_factory=list)
    tokens: int = 1_000_000
    synthetic: float = 0.6
    target: str = DEFAULT_TARGET
    server: str = ""
    model: str = ""
    max_new_tokens: int = 512
    seed: int = 0
    batch_size: int = 96
    concurrency: int = 64
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise HeadwayError(f"--tokens {self.tokens}: must be at least 1")
        if not 0 <= self.synthetic <= 1:
            raise HeadwayError(f"--synthetic {self.synthetic}: give a share from 0 to 1")
        if len(set(self.source)) < len(self.source):
            raise HeadwayError(f"--source {' '.join(self.source)}: one is given twice")
        if self.out.exists() and not self.out.is_dir():
            raise HeadwayError(f"{self.out}: is a file; give --out a folder")


@dataclass
class Progress:
    """By source: prompts asked, tokens of their answers; and the seconds that it took."""

    asked: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def mean(self, source: str) -> float:
        """Answer tokens of a prompt: of this source, else of all, else a guess."""
        for asked, tokens in ((self.asked[source], self.tokens[source]), (self.asked.total(), self.tokens.total())):
            if tokens:
                return tokens / asked
        return FIRST_MEAN


def wanted(settings: Settings, progress: Progress, left: dict[str, int]) -> dict[str, int]:
    """How many prompts of each source the next round asks; `left` says how many there are, but for self-synthesis."""
    share = 1.0 if progress.asked else FIRST_SHARE
    missing = settings.tokens - progress.tokens.total()
    counts: dict[str, int] = {}
    for source in settings.source:
        quota = settings.tokens * (1 - settings.synthetic) / len(settings.source) - progress.tokens[source]
        mean = progress.mean(source)
        counts[source] = min(left[source], math.ceil(share * max(0.0, min(quota, missing)) / mean))
        missing -= math.floor(counts[source] / share * mean)
    counts[SYNTHETIC] = math.ceil(share * max(0, missing) / progress.mean(SYNTHETIC))
    if not any(counts.values()):
        counts[SYNTHETIC] = 1
    return counts


def build(settings: Settings) -> Progress:
    """Answer rounds of prompts until there are enough tokens, then write the set.

    Raises HeadwayError for bad settings or sources, a folder of another set, and as `regenerate`.
    """
    own = refuse_other(settings)
    turns = synthesize.Settings(
        target=settings.target,
        seed=settings.seed,
        batch_size=settings.batch_size,
        dtype=settings.dtype,
        device=settings.device,
    )
    pools = Pools(settings.source, settings.deny, Turns(turns, settings.out / "turns.work"), settings.target)
    print(f"prompts: {pools.tally}")
    settings.out.mkdir(parents=True, exist_ok=True)
    atomic_write_text(settings.out / "settings.json", json.dumps(own, indent=1) + "\n")
    progress, number = Progress(), 0
    while progress.tokens.total() < ENOUGH * settings.tokens:
        run_round(settings, pools, progress, settings.out / f"round-{number:03d}.jsonl")
        number += 1
        print(f"after {number} rounds: {describe(progress)}", flush=True)
    finish(settings, own, progress, number)
    return progress


def refuse_other(settings: Settings) -> dict[str, Any]:
    """What makes this set. Raises HeadwayError when the folder holds one that was made of something else."""
    folder = resolve(settings.target)
    own = {
        "target": fingerprint(folder),
        "sources": {source: _identity(source) for source in settings.source},
        "deny": sorted(_identity(source) for source in settings.deny),
        **{name: getattr(settings, name) for name in ("synthetic", "max_new_tokens", "seed", "batch_size", "dtype")},
    }
    path = settings.out / "settings.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in own if before.get(name) != own[name]]
        if differing:
            raise HeadwayError(
                f"{settings.out}: holds a set made with other {', '.join(differing)}; repeat those, or give a new --out"
            )
    elif settings.out.exists() and any(settings.out.iterdir()):
        raise HeadwayError(f"{settings.out}: holds files but no set; give --out a new folder")
    return own


def _identity(source: str) -> str:
    """A file by its content, anything else by its name."""
    path = Path(source).expanduser()
    return sha256_file(path) if path.is_file() else source


def run_round(settings: Settings, pools: Pools, progress: Progress, answers: Path) -> None:
    """Ask and answer one round, or as much of it as is not done yet, and count it."""
    start = time.monotonic()
    prompts, record = answers.with_suffix(".prompts.jsonl"), answers.with_suffix(".json")
    if not prompts.exists():
        _write(prompts, choose(settings, pools, progress))
    if not answers.exists():
        passed_on = {name: getattr(settings, name) for name in PASSED_ON}
        regenerate.regenerate(regenerate.Settings(prompts=prompts, out=answers, **passed_on))
    if not record.exists():
        atomic_write_text(record, json.dumps({"seconds": time.monotonic() - start}) + "\n")
    progress.asked.update(pools.kind.get(row["id"], SYNTHETIC) for row in _rows(prompts))
    for row in _rows(answers):
        progress.tokens[pools.kind.get(row["id"], SYNTHETIC)] += sum(map(len, row["token_ids"]))
    progress.seconds += json.loads(record.read_text(encoding="utf-8"))["seconds"]


def choose(settings: Settings, pools: Pools, progress: Progress) -> list[dict[str, Any]]:
    """The prompts of the next round, those of the sources first."""
    left = {source: len(pool) - progress.asked[source] for source, pool in pools.prompts.items()}
    counts = wanted(settings, progress, left)
    chosen = (pools.take(source, progress.asked[source], count) for source, count in counts.items())
    return [prompt.row() for prompts in chosen for prompt in prompts]


def finish(settings: Settings, own: dict[str, Any], progress: Progress, rounds: int) -> None:
    """Put the rounds together and write the manifest."""
    out = settings.out / "conversations.jsonl"
    parts = [settings.out / f"round-{number:03d}.jsonl" for number in range(rounds)]
    atomic_write_text(out, "".join(part.read_text(encoding="utf-8") for part in parts))
    manifest = {
        "schema": 1,
        "kind": "conversations",
        "target": {"name": settings.target, "fingerprint": own["target"]},
        "made_of": own,
        "conversations_sha256": sha256_file(out),
        "prompts": dict(progress.asked),
        "tokens": dict(progress.tokens),
        "seconds": round(progress.seconds, 1),
    }
    atomic_write_text(settings.out / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def describe(progress: Progress) -> str:
    """The mix by source, and the time."""
    total = progress.tokens.total()
    mix = ", ".join(
        f"{tokens:,} of {source} ({tokens / total:.1%}, {progress.asked[source]:,} prompts)"
        for source, tokens in progress.tokens.most_common()
    )
    return f"{total:,} answer tokens in {progress.seconds / 60:,.1f} minutes: {mix}"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def main() -> None:
    """Parse the command line and build."""
    parser = ArgumentParser(description="Build a training set of the target's own answers.", exit_on_error=False)
    parser.add_argument("--source", nargs="+", default=[], help="files, folders or Hub names with prompts to train on")
    parser.add_argument("--deny", nargs="+", default=[], help="the same, with prompts that must not be trained on")
    parser.add_class_arguments(Settings, skip={"source", "deny"})
    settings = Settings(**parse_arguments(parser).as_dict())
    print(f"{settings.out}/conversations.jsonl: {describe(build(settings))}")


if __name__ == "__main__":
    run_script(main)
