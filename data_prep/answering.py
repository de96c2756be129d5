"""A run over prompts: who answers them, what is recorded, how far it is."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data_prep.answer_local import answer_locally
from data_prep.answer_server import ServerPool, answer_by_servers
from data_prep.chat_completion import Law
from data_prep.dialogue import Answer, Dialogue
from data_prep.journal import Journal
from data_prep.plan import Source
from heads.errors import HeadwayError
from heads.target import Target, resolve

if TYPE_CHECKING:
    from data_prep.regenerate import Settings

REPORT_SECONDS = 10.0  # between lines where there is no terminal


@dataclass(frozen=True)
class Totals:
    """What a run wrote: conversations, answers in them, tokens of those answers, how many answers were cut.

    `left_out` counts conversations without any answer by reason, `ended_early` those with fewer than their turns.
    """

    conversations: int
    answers: int
    tokens: int
    cut: int
    left_out: dict[str, int]
    ended_early: dict[str, int]


class Run:
    """The dialogues of a run, in the order of the prompts."""

    def __init__(self, settings: Settings, source: Source, dialogues: Sequence[Dialogue]) -> None:
        self.settings, self.source, self.dialogues = settings, source, dialogues
        self.law = Law(settings.temperature, settings.top_p)
        self.pool: ServerPool | None = None
        self.journal: Journal | None = None
        self.pace = Pace(sum(dialogue.answers for dialogue in dialogues))

    def made_by(self) -> dict[str, Any]:
        """How the answers come about: the field of each row."""
        settings = self.settings
        sampled = {"top_p": settings.top_p, "seed": settings.seed} if settings.temperature else {}
        return {
            "target": self.source.name,
            "fingerprint": self.source.fingerprint,
            "by": "server" if settings.server else f"transformers, {self.source.dtype}",
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
        } | sampled

    def header(self) -> dict[str, Any]:
        """What two runs must have in common for one to go on with the other's answers."""
        made_by = {name: value for name, value in self.made_by().items() if name != "target"}
        return {"kind": "regenerate"} | made_by | {"template_options": self.settings.template_options}

    def plan(self) -> str:
        """What there is to do, in a line or two."""
        open_ones = [dialogue for dialogue in self.dialogues if not dialogue.ended]
        due = sum(dialogue.answers - len(dialogue.token_ids) for dialogue in open_ones)
        prompt = sum(len(dialogue.prompt) for dialogue in open_ones)
        there = sum(len(dialogue.token_ids) for dialogue in self.dialogues)
        way = f"sampled at temperature {self.law.temperature}" if self.law.temperature else "greedy"
        where = self.settings.server or f"in this process, {self.source.dtype}"
        return (
            f"{len(self.dialogues):,} conversations, {there:,} answers there, {due:,} to be written ({way}, {where}): "
            f"{prompt:,} prompt tokens to begin with, at most {due * self.settings.max_new_tokens:,} tokens of answers"
        )

    def connect(self) -> None:
        """Find out what the servers serve, if there are any. Raises HeadwayError where it is not the target."""
        given = self.settings
        if given.server:
            folder = str(resolve(given.target))
            urls = given.server.split(",")
            self.pool = ServerPool(
                urls, given.target, folder, given.model, given.concurrency, given.timeout, given.patience
            )
            self.pool.find_models()

    def resume(self, journal: Journal) -> None:
        """Take what earlier runs have recorded: by id and turn, and only for the very prompt that was answered."""
        self.journal = journal
        if journal.torn:
            print(f"{journal.path}: the last line was cut when the last run stopped; that answer is asked for again")
        recorded = {(entry["id"], entry["turn"], entry["prompt"]): entry for entry in journal.entries}
        used = 0
        for dialogue in self.dialogues:
            while not dialogue.ended:
                entry = recorded.get((dialogue.id, dialogue.turn, dialogue.prompt_hash))
                if entry is None:
                    break
                used += 1
                if "left_out" in entry:
                    dialogue.leave(entry["left_out"])
                else:
                    dialogue.add(entry["message"], entry["ids"], cut=entry["cut"])
            self.pace.skip(dialogue.answers if dialogue.ended else len(dialogue.token_ids))
        if used < len(recorded):
            print(f"{journal.path}: {len(recorded) - used} answers to prompts that are not here (or not any more)")

    def answer(self) -> None:
        """Answer everything that is due. Raises HeadwayError for servers that fail or are not what they should be."""
        due = [dialogue for dialogue in self.dialogues if not dialogue.ended]
        if not due:
            return
        most = self.settings.max_new_tokens
        with self.pace:
            if self.pool is None:
                target = Target.load(self.settings.target, self.source.dtype, self.settings.device)
                law = (self.law.temperature, self.law.top_p) if self.law.temperature else None
                answer_locally(due, self.take, target, self.settings.batch_size, most, law, self.seed)
                return
            failed = asyncio.run(answer_by_servers(due, self.take, self.pool, most, self.law, self.seed))
        if failed:
            dialogue, fault = failed[0]
            raise HeadwayError(
                f"{len(failed)} conversations got no answer (first: {dialogue.where}, '{dialogue.id}': {fault}); run the "
                "same command again to ask for these alone, or remove them from the prompts"
            )

    def seed(self, dialogue: Dialogue) -> int:
        """Of the coins of a due answer: the same in every run, whoever answers."""
        digest = hashlib.sha256(f"{self.settings.seed} {dialogue.id} {dialogue.turn}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def take(self, dialogue: Dialogue, answer: Answer) -> None:
        """Record an answer and move its dialogue on."""
        assert self.journal is not None
        entry: dict[str, Any] = {"id": dialogue.id, "turn": dialogue.turn, "prompt": dialogue.prompt_hash}
        before = len(dialogue.token_ids)
        kept = dialogue.take(answer)
        if kept is None:
            entry["left_out"] = dialogue.left_out
        else:
            entry |= {"message": kept[0], "ids": kept[1], "cut": answer.cut}
        self.journal.append(entry)
        self.pace.advance(dialogue.answers - before if dialogue.ended else 1, answer.count)

    def totals(self) -> Totals:
        """What has come of all dialogues."""
        kept = [dialogue for dialogue in self.dialogues if dialogue.token_ids]
        return Totals(
            conversations=len(kept),
            answers=sum(len(dialogue.token_ids) for dialogue in kept),
            tokens=sum(len(ids) for dialogue in kept for ids in dialogue.token_ids),
            cut=sum(dialogue.finish_reason == "length" for dialogue in kept),
            left_out=Counter(each.left_out for each in self.dialogues if each.left_out and not each.token_ids),
            ended_early=Counter(each.left_out for each in kept if each.left_out),
        )


class Pace:
    """Answers done, tokens/s and the time left: a bar on a terminal, else a line every few seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.tokens = total, 0, 0
        self.started = self.reported = time.monotonic()
        self.console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("answers", total=total)

    def __enter__(self) -> Self:
        self.started = self.reported = time.monotonic()
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self._report()

    def skip(self, answers: int) -> None:
        """Count answers of an earlier run."""
        self.done += answers
        self.bar.update(self.task, completed=self.done)

    def advance(self, answers: int, tokens: int) -> None:
        """Count answers, of `tokens` tokens together."""
        self.done, self.tokens = self.done + answers, self.tokens + tokens
        self.bar.update(self.task, completed=self.done, description=self._text())
        if time.monotonic() - self.reported >= REPORT_SECONDS:
            self._report()

    def _text(self) -> str:
        rate = self.tokens / max(time.monotonic() - self.started, 1e-9)
        return f"{self.done:,} of {self.total:,} answers, {self.tokens:,} tokens, {rate:,.0f} tokens/s"

    def _report(self) -> None:
        self.reported = time.monotonic()
        if not self.console.is_terminal:
            print(self._text(), flush=True)
