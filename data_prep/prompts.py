"""Anyone's data as prompts for the target to answer: read, deduplicated, without what is measured on.

    python data_prep/prompts.py --source FILE_OR_NAME [FILE_OR_NAME ...] --out prompts.jsonl --deny benchmark.jsonl

A row is {"id", "messages", "tools" where there are some, "finish_reason": "unanswered"}. The target answers every user
turn and every run of tool turns, in order. Assistant turns that came along stay in their places, to be replaced: they
are somebody else's words, and "unanswered" keeps `collect.py` from learning them. `data_prep/recognise.py` lists the
formats.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.progress import track

from data_prep.conversations import Conversation, split_heldout
from data_prep.recognise import Message, Misfit, recognise
from data_prep.sources import rows_of
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, run_script

UNANSWERED = "unanswered"
REASONS = 5  # named in the summary


@dataclass(frozen=True)
class Settings:
    """Where prompts come from and which of them are taken.

    Args:
        source: files (.jsonl, .json, .parquet), folders or names of the Hub (NAME or NAME:CONFIG)
        out: JSON lines file to write; what is held out goes beside it, into NAME.heldout.jsonl. Older files of these names
            are replaced; where nothing is held out, an older NAME.heldout.jsonl is removed
        split: of folders and names
        deny: files, folders or names with prompts to measure on; a row that holds one of their user turns is left out
        deny_split: of folders and names given to --deny
        count: take at most so many rows of each source, the first that fit; all of them where it is not given
        held_out: conversations to hold out, those of the smallest hash of their id
    """

    source: list[str]
    out: Path = Path("artifacts/prompts.jsonl")
    split: str = "train"
    deny: list[str] = field(default_factory=list)
    deny_split: str = "test"
    count: int | None = None
    held_out: int = 0

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise HeadwayError(f"--count {self.count}: must be at least 1")
        if self.held_out < 0:
            raise HeadwayError(f"--held_out {self.held_out}: give 0 or a positive number")
        if self.out.is_dir():
            raise HeadwayError(f"{self.out}: --out is a folder; give a file name")
        for path in (self.out, self.heldout):
            given = [each for each in (*self.source, *self.deny) if Path(each).expanduser().resolve() == path.resolve()]
            if given:
                raise HeadwayError(f"{given[0]}: would be written over; give another --out")

    @property
    def heldout(self) -> Path:
        """The file of what is held out."""
        return self.out.with_name(f"{self.out.stem}.heldout.jsonl")


@dataclass(frozen=True)
class Prompt:
    """A conversation for the target to answer; `source` names its file and row."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    source: str

    def row(self) -> dict[str, Any]:
        """It as a row of a prompts file."""
        tools = {"tools": self.tools} if self.tools else {}
        return {"id": self.id, "messages": self.messages} | tools | {"finish_reason": UNANSWERED}


@dataclass
class Tally:
    """What became of the rows: how many were `kept` of each source, how many left out and why, the first of each."""

    kept: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def leave_out(self, reason: str, where: str) -> None:
        """Count a row that is not taken."""
        self.left_out[reason] += 1
        self.first.setdefault(reason, where)

    def absorb(self, other: Tally) -> None:
        """Count another's rows too, which come after this one's."""
        self.kept += other.kept
        self.left_out += other.left_out
        self.first = other.first | self.first

    def __str__(self) -> str:
        kept = ", ".join(f"{count:,} of {source}" for source, count in self.kept.items())
        return f"{self.kept.total():,} kept ({kept or 'none'}); {self.faults()}"

    def faults(self) -> str:
        """The reasons, commonest first, each with its first row."""
        common = self.left_out.most_common(REASONS)
        named = [f"{count:,} x {reason} (first: {self.first[reason]})" for reason, count in common]
        rest = len(self.left_out) - len(common)
        more = [f"{rest} other reasons"] if rest else []
        return f"{self.left_out.total():,} left out{': ' * bool(named)}{', '.join(named + more)}"


def normalised(text: str) -> str:
    """What deduplication compares: case-folded, compatibility forms unified, runs of white space as one blank."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _digest(*texts: str) -> bytes:
    return hashlib.sha256(json.dumps([normalised(text) for text in texts]).encode()).digest()[:16]


class Sieve:
    """Lets each conversation through once, by the normalised text of its user and tool turns, and none with a user
    turn that is denied. It keeps digests of 16 bytes, not the texts."""

    def __init__(self, denied: Iterable[str] = ()) -> None:
        self.denied = {_digest(text) for text in denied}
        self.seen: set[bytes] = set()

    def refuses(self, messages: Sequence[Message]) -> str | None:
        """Why a conversation is not taken, or None; then it counts as seen."""
        if any(_digest(each["content"]) in self.denied for each in messages if each["role"] == "user"):
            return "has a user turn of the deny-list"
        key = _digest(*(each["content"] for each in messages if each["role"] in ("user", "tool")))
        if key in self.seen:
            return "the same user turns as an earlier row"
        self.seen.add(key)
        return None


def denied_turns(deny: Iterable[str], split: str = "test") -> Iterator[str]:
    """Every user turn of the sources to be denied.

    Raises HeadwayError for a row that cannot be read, and a source without any: it would be a hole in the list.
    """
    for source in deny:
        where = None
        for where, row in rows_of(source, split):
            try:
                messages = _chat(row).messages
            except Misfit as error:
                raise HeadwayError(f"{where}: {error}, so it cannot be denied; mend or remove the row") from error
            yield from (message["content"] for message in messages if message["role"] == "user")
        if where is None:
            raise HeadwayError(f"{source}: has no row, so it denies nothing; give --deny the prompts, or leave it out")


def _chat(row: Any) -> Any:
    if isinstance(row, Misfit):
        raise row
    return recognise(row)


def content_id(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """An id that follows from what the target is to answer: the same whatever the order of rows or the old answers."""
    asked = [[message["role"], message["content"]] for message in messages if message["role"] != "assistant"]
    text = json.dumps([asked, list(tools)], sort_keys=True)
    return f"p-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def load_prompts(
    sources: Iterable[str], split: str, sieve: Sieve, tally: Tally, count: int | None = None
) -> Iterator[Prompt]:
    """The conversations of `sources`, in order, one at a time; `tally` counts what is left out and why.

    At most `count` of each source. A file that `write_prompts` wrote is a source too, and keeps its ids. Raises
    HeadwayError for a source that cannot be read.
    """
    ids: set[str] = set()
    for source in sources:
        tally.kept[source] += 0
        for where, row in rows_of(source, split):
            if tally.kept[source] == count:
                break
            try:
                chat = _chat(row)
            except Misfit as error:
                tally.leave_out(str(error), where)
                continue
            identity = chat.id or content_id(chat.messages, chat.tools)
            reason = "its id is another row's already" if identity in ids else sieve.refuses(chat.messages)
            if reason:
                tally.leave_out(reason, where)
                continue
            ids.add(identity)
            tally.kept[source] += 1
            yield Prompt(identity, chat.messages, chat.tools, where)


def write_prompts(settings: Settings) -> Tally:
    """Write the prompts and those held out; one row is in memory at a time.

    Raises HeadwayError when nothing can be kept, or less than is to be held out; then nothing is written.
    """
    sieve, tally = Sieve(denied_turns(settings.deny, settings.deny_split)), Tally()
    prompts = load_prompts(settings.source, settings.split, sieve, tally, settings.count)
    out, heldout = settings.out, settings.heldout
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in (out, heldout)}
    everything = out.with_name(f".{out.name}.{os.getpid()}.all")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        ids = _write_all(everything, prompts)
        if not ids:
            raise HeadwayError(f"{', '.join(settings.source)}: no row can be used; {tally.faults()}")
        _, held = split_heldout([Conversation(identity, []) for identity in ids], settings.held_out)
        _split(everything, ids, {each.id for each in held}, parts[out], parts[heldout])
        if not held:
            heldout.unlink(missing_ok=True)  # what it holds may be among the prompts now
        os.replace(parts[out], out)
        if held:
            os.replace(parts[heldout], heldout)
    finally:
        for path in (everything, *parts.values()):
            path.unlink(missing_ok=True)
    return tally


def _write_all(path: Path, prompts: Iterable[Prompt]) -> list[str]:
    ids = []
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for prompt in track(prompts, "rows kept", disable=not Console().is_terminal):
            file.write(json.dumps(prompt.row(), ensure_ascii=False) + "\n")
            ids.append(prompt.id)
    return ids


def _split(everything: Path, ids: Sequence[str], held: set[str], kept_path: Path, held_path: Path) -> None:
    """Copy the lines, whose ids are `ids`, to two files."""
    with everything.open("rb") as lines, kept_path.open("wb") as kept, held_path.open("wb") as left:
        for identity, line in zip(ids, lines, strict=True):
            (left if identity in held else kept).write(line)
        for file in (kept, left):
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    """Parse the command line and write."""
    parser = ArgumentParser(description="Turn data sets into prompts for the target.", exit_on_error=False)
    parser.add_argument("--source", nargs="+", required=True, help="files, folders or Hub names (NAME or NAME:CONFIG)")
    parser.add_argument("--deny", nargs="+", default=[], help="the same, with prompts that must not be trained on")
    parser.add_class_arguments(Settings, skip={"source", "deny"})
    settings = Settings(**parse_arguments(parser).as_dict())
    print(f"{settings.out}: {write_prompts(settings)}; {settings.held_out} held out")


if __name__ == "__main__":
    run_script(main)
