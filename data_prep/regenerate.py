"""Let the target answer the user turns of a file of prompts: conversations in its own words.

    python data_prep/regenerate.py --prompts FILE --out FILE
    python data_prep/regenerate.py --prompts FILE --out FILE --server http://one:8000/v1,http://two:8000/v1

The prompts are rows of any format that `data_prep/recognise.py` lists. The target answers each user turn and each round
of tool results, in order; assistant turns that came along are replaced. Answers are greedy unless there is a
temperature. A row of the result is a conversation with two more fields: `token_ids`, the ids that the target wrote in
each of its turns, and `made_by`, how. A conversation ends with the first answer that was cut at --max_new_tokens
(finish_reason "length"), and before an answer whose text would not be tokenised to what the target wrote.

A server is started on the target's folder (`vllm serve FOLDER`); its key, if it wants one, is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from data_prep.answering import Run, Totals
from data_prep.dialogue import Dialogue
from data_prep.journal import Journal
from data_prep.plan import Source, describe
from data_prep.prompts import Sieve, Tally, load_prompts
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, atomic_write_text, run_script
from heads.target import DEFAULT_TARGET, auto_device


@dataclass(frozen=True)
class Settings:
    """What to answer, how, and who answers.

    Args:
        prompts: file of prompts; assistant turns found there are replaced
        out: conversations to write; a run that was killed goes on from the work file beside it
        target: embedded name, local folder or Hub id
        server: base URLs of OpenAI-compatible servers of the target, separated by commas; empty: answer in this process
        model: the name under which the servers serve the target, where it is not the target's own
        temperature: 0 answers greedily, more samples from the target's law
        top_p: sampled answers keep to the nucleus of this weight
        max_new_tokens: an answer that has not ended by then is cut, and marked with finish_reason "length"
        seed: of sampled answers
        template_options: variables of the chat template, such as {"enable_thinking": false}
        concurrency: answers in flight at each server
        timeout: seconds that a server may take for an answer
        patience: seconds that all servers may be at fault before the run stops
        batch_size: rows of a forward pass in this process
        dtype: of the target in this process; auto is bfloat16 where the device is fast at it, else float32
        device: of the target in this process: auto, cpu, cuda, cuda:1 ...
        dry_run: print the plan and stop
    """

    prompts: Path
    out: Path
    target: str = DEFAULT_TARGET
    server: str = ""
    model: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    template_options: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 64
    timeout: float = 600.0
    patience: float = 300.0
    batch_size: int = 96
    dtype: str = "auto"
    device: str = "auto"
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "concurrency", "batch_size"):
            if getattr(self, name) < 1:
                raise HeadwayError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.timeout <= 0 or self.patience < 0:
            raise HeadwayError(
                "--temperature and --patience must be at least 0, --timeout above 0, --top_p above 0 and at most 1"
            )
        if self.temperature == 0 and self.top_p != 1:
            raise HeadwayError(f"--top_p {self.top_p}: is for sampled answers; give a --temperature too")


def regenerate(settings: Settings) -> Totals | None:
    """Answer every prompt that the work file does not hold yet and write the conversations in the order of the prompts.
    None for a dry run.

    Raises HeadwayError for bad settings or prompts, a server of another model, servers that fail, and where nothing is
    left to write.
    """
    work = settings.out.with_name(f"{settings.out.name}.work")
    if settings.out.is_dir() or (settings.out.exists() and not work.exists()):
        raise HeadwayError(f"{settings.out}: is there already; remove it, or give another --out")
    source = describe(settings.target, settings.dtype, auto_device(settings.device))
    dialogues = open_dialogues(settings, source)
    run = Run(settings, source, dialogues)
    if settings.dry_run:
        print(run.plan())
        return None
    run.connect()
    with Journal(work, run.header()) as journal:
        run.resume(journal)
        print(run.plan())
        run.answer()
        totals = write(settings, run)
        journal.remove()
    return totals


def open_dialogues(settings: Settings, source: Source) -> list[Dialogue]:
    """A dialogue for each prompt, in order. Raises HeadwayError where there is none, or the target is no chat model."""
    if not source.stop_ids:
        raise HeadwayError(f"target '{source.name}': names no stop token, so its turns never end; use a chat model")
    tally = Tally()
    prompts = list(load_prompts([str(settings.prompts)], "train", Sieve(), tally))
    if tally.left_out:
        print(f"{settings.prompts}: {tally.faults()}")
    if not prompts:
        raise HeadwayError(f"{settings.prompts}: no row is a prompt; see data_prep/recognise.py for the formats")
    return [Dialogue(prompt, source.tokenizer, source.stop_ids, settings.template_options) for prompt in prompts]


def write(settings: Settings, run: Run) -> Totals:
    """Write the conversations that have an answer, whole or not at all. Raises HeadwayError where none has."""
    totals = run.totals()
    if not totals.conversations:
        raise HeadwayError(f"{settings.prompts}: no answer can be kept: {_named(totals.left_out)}; nothing is written")
    rows = [dialogue.row(run.made_by()) for dialogue in run.dialogues if dialogue.token_ids]
    atomic_write_text(settings.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return totals


def summary(totals: Totals) -> str:
    """Totals in a line."""
    kept = f"{totals.conversations:,} conversations, {totals.answers:,} answers ({totals.cut:,} cut)"
    parts = [f"{kept}, {totals.tokens:,} tokens"]
    if totals.left_out:
        parts.append(f"left out: {_named(totals.left_out)}")
    if totals.ended_early:
        parts.append(f"ended early: {_named(totals.ended_early)}")
    return "; ".join(parts)


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in counts.items())


def main() -> None:
    """Parse the command line and answer."""
    parser = ArgumentParser(description="Let the target answer a file of prompts.", exit_on_error=False)
    parser.add_argument("--dry_run", action="store_true", help="print the plan and stop")
    parser.add_class_arguments(Settings, skip={"dry_run"})
    settings = Settings(**parse_arguments(parser).as_dict())
    totals = regenerate(settings)
    if totals is not None:
        print(f"{settings.out}: {summary(totals)}")


if __name__ == "__main__":
    run_script(main)
