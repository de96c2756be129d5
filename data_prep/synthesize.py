"""Let the target write its own conversations: it invents the user turns by sampling, then answers them greedily.

    python data_prep/synthesize.py --out FILE
    python data_prep/synthesize.py --target DIR_OR_HUB_ID --count 5000 --out FILE

Given its chat template up to the user marker, a chat model goes on with what a user might say (no other data is
needed). Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data_prep.prompts import normalised
from data_prep.writer import Writer, sample_nucleus
from heads.errors import HeadwayError, atomic_write_text, run_script
from heads.target import DEFAULT_TARGET, Target

MARK = "\u241f"  # stands for the user's text when a template is rendered up to it; no template contains it
Message = dict[str, str]


@dataclass(frozen=True)
class Settings:
    """What to write, and how much of it.

    Args:
        target: embedded name, local folder or Hub id
        out: JSON lines file to write; a run that was killed goes on from the work file beside it
        count: user turns to invent; the few answers whose text does not give their own tokens back are left out
        two_turns: conversations that get a second exchange
        seed: of the sampled user turns
        max_user_tokens: a user turn that has not ended by then is thrown away
        max_answer_tokens: an answer that has not ended by then is cut, and marked with finish_reason "length"
        temperature: of the user turns
        top_p: of the user turns
        batch_size: rows of a forward pass
        dtype: of the target; auto is bfloat16 where the device is fast at it, else float32
        device: auto, cpu, cuda, cuda:1 ...
    """

    target: str = DEFAULT_TARGET
    out: Path = Path("artifacts/conversations.jsonl")
    count: int = 1200
    two_turns: int = 100
    seed: int = 0
    max_user_tokens: int = 48
    max_answer_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 0.95
    batch_size: int = 96
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("count", "max_user_tokens", "max_answer_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise HeadwayError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.two_turns < 0 or self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise HeadwayError("--two_turns must be at least 0, --temperature above 0, --top_p above 0 and at most 1")


class Work:
    """Finished batches of a run, one JSON line each, so that a kill loses one batch.

    Raises HeadwayError when the file belongs to a run with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[str, Any] = {}
        header = json.dumps({"settings": settings}, sort_keys=True)
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what follows the last newline was cut
        if lines and lines[0].decode() != header:
            raise HeadwayError(
                f"{path}: line 1: was begun with other settings; repeat those, or remove it to start anew"
            )
        self.done = {entry["batch"]: entry["rows"] for entry in map(json.loads, lines[1:])}
        path.write_bytes(b"".join(line + b"\n" for line in lines or [header.encode()]))

    def run(self, batch: str, compute: Callable[[], list[Any]]) -> list[Any]:
        """The rows of a batch: as stored, or computed and stored."""
        if batch not in self.done:
            self.done[batch] = compute()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"batch": batch, "rows": self.done[batch]}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return self.done[batch]


class Author(Writer):
    """A target that invents user turns and answers them."""

    def user_prompt(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation so far and the marker that opens the next user turn."""
        text = self.tokenizer.apply_chat_template([*messages, {"role": "user", "content": MARK}], tokenize=False)
        return self.tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"]

    def invent(self, histories: Sequence[list[Message]], settings: Settings, name: str) -> list[str | None]:
        """One sampled user turn for each history; None where it did not end in time or is no sane text."""
        seed = int.from_bytes(hashlib.sha256(f"{settings.seed} {name}".encode()).digest()[:7], "big")
        generator = torch.Generator(self.target.device).manual_seed(seed)
        prompts = [self.user_prompt(history) for history in histories]
        rows = self.write(
            prompts,
            settings.max_user_tokens,
            lambda logits_BV: sample_nucleus(logits_BV, settings.temperature, settings.top_p, generator),
        )
        return [self.sane_text(ids) for ids in rows]

    def sane_text(self, ids: list[int]) -> str | None:
        """The text of an ended turn, or None: cut, without letters, with markers or unprintable characters."""
        if ids[-1] not in self.target.eos_ids:
            return None
        if set(ids[:-1]) & set(self.tokenizer.all_special_ids):
            return None
        text = self.tokenizer.decode(ids[:-1]).strip()
        if any(marker in text for marker in self.tokenizer.all_special_tokens):
            return None
        unprintable = any(c == "\ufffd" or (unicodedata.category(c)[0] == "C" and c not in "\n\t") for c in text)
        return None if unprintable or sum(c.isalpha() for c in text) < 3 else text

    def answer(self, histories: Sequence[list[Message]], most: int) -> list[tuple[str, str] | None]:
        """(text, finish_reason) of the greedy answer to each history; None where the text is empty or would not be
        tokenised to what the target wrote."""
        texts = [self._opened(history) for history in histories]
        prompts = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rows = self.write(prompts, most, lambda logits_BV: logits_BV.argmax(-1))
        answers: list[tuple[str, str] | None] = []
        for history, prompt, ids in zip(histories, prompts, rows, strict=True):
            ended = ids[-1] in self.target.eos_ids
            said = self.tokenizer.decode(ids[:-1] if ended else ids)
            whole = self.tokenizer.apply_chat_template(
                [*history, {"role": "assistant", "content": said}], tokenize=False
            )
            again = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
            exact = again[: len(prompt) + len(ids)] == prompt + ids
            answers.append((said, "stop" if ended else "length") if exact and said.strip() else None)
        return answers

    def _opened(self, history: list[Message]) -> str:
        return self.tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)


class Counter:
    """A bar with the time left on a terminal, else a line a batch."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(label, total=total)
        self.bar.start()

    def show(self, done: int) -> None:
        """Set what is done; the bar stops when that is everything."""
        self.bar.update(self.task, completed=min(done, self.total))
        if not self.console.is_terminal:
            print(f"{self.label}: {min(done, self.total)} of {self.total}", flush=True)
        if done >= self.total:
            self.bar.stop()


def conversation_id(text: str) -> str:
    """The id of the conversation that a user's text opens: stable under order, settings and answers."""
    return f"syn-{hashlib.sha256(normalised(text).encode()).hexdigest()[:12]}"


def opening_turns(writer: Author, work: Work, settings: Settings) -> dict[str, str]:
    """`count` user turns, id -> text, no two with the same normalised text."""
    turns: dict[str, str] = {}
    counter = Counter("user turns", settings.count)
    number = barren = 0
    while len(turns) < settings.count:
        name, before = f"turns {number}", len(turns)
        found = work.run(name, lambda name=name: writer.invent([[]] * settings.batch_size, settings, name))  # type: ignore[misc]
        for text in filter(None, found):
            if len(turns) < settings.count:
                turns.setdefault(conversation_id(text), text)
        number, barren = number + 1, barren + 1 if len(turns) == before else 0
        if barren == 20:
            raise HeadwayError(
                f"target '{settings.target}': 20 batches gave no new user turn after {before}; lower --count, raise "
                "--temperature or --max_user_tokens, or use a chat model"
            )
        counter.show(len(turns))
    return turns


def batches(rows: dict[str, list[Message]], size: int) -> Iterator[list[str]]:
    """Ids of conversations, those of about the same length together."""
    ids = sorted(rows, key=lambda key: (sum(len(message["content"]) for message in rows[key]), key))
    for first in range(0, len(ids), size):
        yield ids[first : first + size]


def exchange(
    writer: Author, work: Work, settings: Settings, label: str, histories: dict[str, list[Message]]
) -> dict[str, tuple[list[Message], str]]:
    """Answer each history (its last message is the user's): id -> (messages, finish_reason)."""
    answered: dict[str, tuple[list[Message], str]] = {}
    counter, done = Counter(label, len(histories)), 0
    for number, ids in enumerate(batches(histories, settings.batch_size)):
        asked = [histories[key] for key in ids]
        found = work.run(f"{label} {number}", lambda asked=asked: writer.answer(asked, settings.max_answer_tokens))  # type: ignore[misc]
        for key, answer in zip(ids, found, strict=True):
            if answer is not None:
                answered[key] = ([*histories[key], {"role": "assistant", "content": answer[0]}], answer[1])
        done += len(ids)
        counter.show(done)
    return answered


def second_turns(
    writer: Author, work: Work, settings: Settings, answered: dict[str, tuple[list[Message], str]]
) -> dict[str, list[Message]]:
    """Invent a second user turn for the first `two_turns` conversations, by id, whose answer came to its end."""
    ids = [key for key in sorted(answered) if answered[key][1] == "stop"][: settings.two_turns]
    chosen = {key: answered[key][0] for key in ids}
    asked: dict[str, list[Message]] = {}
    for number, group in enumerate(batches(chosen, settings.batch_size)):
        name, histories = f"second turns {number}", [chosen[key] for key in group]
        found = work.run(name, lambda name=name, histories=histories: writer.invent(histories, settings, name))  # type: ignore[misc]
        for key, text in zip(group, found, strict=True):
            if text is not None and normalised(text) != normalised(chosen[key][0]["content"]):
                asked[key] = [*chosen[key], {"role": "user", "content": text}]
    return asked


def synthesize(settings: Settings) -> None:
    """Write the conversations, sorted by id. The work file is removed once they are in place."""
    if settings.out.is_dir():
        raise HeadwayError(f"{settings.out}: --out is a folder; give a file name")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    writer = Author(Target.load(settings.target, settings.dtype, settings.device))
    header = {key: str(value) for key, value in asdict(settings).items() if key not in ("target", "out")}
    work = Work(
        settings.out.with_name(f"{settings.out.name}.work"), header | {"fingerprint": writer.target.fingerprint}
    )
    turns = opening_turns(writer, work, settings)
    opened = {key: [{"role": "user", "content": text}] for key, text in turns.items()}
    answered = exchange(writer, work, settings, "answers", opened)
    asked = second_turns(writer, work, settings, answered)
    answered |= exchange(writer, work, settings, "second answers", asked)
    rows = [{"id": key, "messages": answered[key][0], "finish_reason": answered[key][1]} for key in sorted(answered)]
    atomic_write_text(settings.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    work.path.unlink()
    cut = sum(row["finish_reason"] == "length" for row in rows)
    print(
        f"{settings.out}: {len(rows)} conversations, {settings.out.stat().st_size:,} bytes, {cut} cut at "
        f"{settings.max_answer_tokens} tokens; {len(turns) - len(rows)} left out, whose text is not tokenised to what "
        "the target wrote"
    )


def main() -> None:
    """Parse the command line and write."""
    parser = ArgumentParser(description="Let the target write its own conversations.", exit_on_error=False)
    parser.add_class_arguments(Settings)
    try:
        parsed = parser.parse_args(sys.argv[1:])
    except ArgumentError as error:
        raise HeadwayError(f"{error}; see --help") from error
    synthesize(Settings(**parsed.as_dict()))


if __name__ == "__main__":
    run_script(main)
