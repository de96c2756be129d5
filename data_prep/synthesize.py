"""Let the target write its own conversations: it invents the user turns by sampling, then answers them greedily.

    python data_prep/synthesize.py --out FILE
    python data_prep/synthesize.py --target DIR_OR_HUB_ID --count 5000 --out FILE
    python data_prep/synthesize.py --topics "sailing boats;Python programming" --out FILE

Given its chat template up to the user marker, a chat model goes on with what a user might say (no other data is
needed). `data_prep/seeds.py` says how topics, a language and first words steer it. Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2.exceptions import TemplateError
from jsonargparse import ArgumentParser

from data_prep.nucleus import Sampler
from data_prep.prompts import normalised
from data_prep.seeds import Seed, Seeds
from data_prep.work import Counter, Work
from data_prep.writer import Text, Writer
from heads.command_line import parse_arguments
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
        system: a system turn before the invented user turns
        topics: what the user turns are about, in turn: a file with one a line, or a list separated by semicolons
        language: the language of the user turns, by its English name
        openings: first words of the user turns, in turn: a file or a list, as --topics
        keep_system: leave the system turn that steers (--system, --topics, --language) in the conversations, so that
            it is answered too; without it the answers are those to the user turn alone
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
    system: str = ""
    topics: str = ""
    language: str = ""
    openings: str = ""
    keep_system: bool = False
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


class Author(Writer):
    """A target that invents user turns and answers them."""

    def user_prompt(self, messages: list[Message], opening: str = "") -> list[int]:
        """Ids of a conversation so far, the marker that opens the next user turn, and that turn's first words.

        Raises HeadwayError when the chat template refuses the messages.
        """
        try:
            text = self.target.tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": MARK}], tokenize=False
            )
        except TemplateError as error:
            raise HeadwayError(
                f"target '{self.target.name}': its chat template refuses a {messages[0]['role']} turn ({error}); leave "
                "out --system, --topics and --language; --openings need none"
            ) from error
        return self.target.tokenizer(text[: text.index(MARK)] + opening, add_special_tokens=False)["input_ids"]

    def invent(
        self, histories: Sequence[list[Message]], settings: Settings, name: str, openings: Sequence[str] = ()
    ) -> list[str | None]:
        """One sampled user turn for each history, with its opening; None where it did not end in time or is no sane
        text."""
        begun = list(openings) or [""] * len(histories)
        texts = [
            Text(self.user_prompt(history, opening), settings.max_user_tokens, _seed(f"{settings.seed} {name} {row}"))
            for row, (history, opening) in enumerate(zip(histories, begun, strict=True))
        ]
        rows = self.write_all(texts, Sampler(settings.temperature, settings.top_p))
        return [self.sane_text(ids, opening) for ids, opening in zip(rows, begun, strict=True)]

    def sane_text(self, ids: list[int], opening: str = "") -> str | None:
        """The text of an ended turn behind its opening, or None: cut, without letters, with markers or unprintable
        characters."""
        if ids[-1] not in self.target.eos_ids:
            return None
        if set(ids[:-1]) & set(self.target.tokenizer.all_special_ids):
            return None
        text = (opening + self.target.tokenizer.decode(ids[:-1])).strip()
        if any(marker in text for marker in self.target.tokenizer.all_special_tokens):
            return None
        unprintable = any(c == "\ufffd" or (unicodedata.category(c)[0] == "C" and c not in "\n\t") for c in text)
        return None if unprintable or sum(c.isalpha() for c in text) < 3 else text

    def answer(self, histories: Sequence[list[Message]], most: int) -> list[tuple[str, str] | None]:
        """(text, finish_reason) of the greedy answer to each history; None where the text is empty or would not be
        tokenised to what the target wrote."""
        texts = [self._opened(history) for history in histories]
        prompts = [self.target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rows = self.write_all([Text(prompt, most) for prompt in prompts])
        answers: list[tuple[str, str] | None] = []
        for history, prompt, ids in zip(histories, prompts, rows, strict=True):
            ended = ids[-1] in self.target.eos_ids
            said = self.target.tokenizer.decode(ids[:-1] if ended else ids)
            whole = self.target.tokenizer.apply_chat_template(
                [*history, {"role": "assistant", "content": said}], tokenize=False
            )
            again = self.target.tokenizer(whole, add_special_tokens=False)["input_ids"]
            exact = again[: len(prompt) + len(ids)] == prompt + ids
            answers.append((said, "stop" if ended else "length") if exact and said.strip() else None)
        return answers

    def _opened(self, history: list[Message]) -> str:
        return self.target.tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def conversation_id(text: str) -> str:
    """The id of the conversation that a user's text opens: stable under order, settings and answers."""
    return f"syn-{hashlib.sha256(normalised(text).encode()).hexdigest()[:12]}"


def opening_turns(writer: Author, work: Work, settings: Settings, seeds: Seeds) -> dict[str, tuple[str, Seed]]:
    """`count` user turns, id -> (text, what steered it), no two with the same normalised text."""
    turns: dict[str, tuple[str, Seed]] = {}
    counter = Counter("user turns", settings.count)
    number = barren = 0
    while len(turns) < settings.count:
        name, before = f"turns {number}", len(turns)
        steered = [seeds[number * settings.batch_size + row] for row in range(settings.batch_size)]
        histories, openings = [seed.turn() for seed in steered], [seed.opening for seed in steered]
        found = work.run(name, lambda name=name, h=histories, o=openings: writer.invent(h, settings, name, o))  # type: ignore[misc]
        for text, seed in zip(found, steered, strict=True):
            if text is not None and len(turns) < settings.count:
                turns.setdefault(conversation_id(text), (text, seed))
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
    writer: Author,
    work: Work,
    settings: Settings,
    answered: dict[str, tuple[list[Message], str]],
    turns: dict[str, tuple[str, Seed]],
) -> dict[str, list[Message]]:
    """Invent a second user turn for the first `two_turns` conversations, by id, whose answer came to its end."""
    ids = [key for key in sorted(answered) if answered[key][1] == "stop"][: settings.two_turns]
    chosen = {key: answered[key][0] for key in ids}
    asked: dict[str, list[Message]] = {}
    for number, group in enumerate(batches(chosen, settings.batch_size)):
        name = f"second turns {number}"
        steering = [[] if settings.keep_system else turns[key][1].turn() for key in group]  # what is kept is there
        histories = [[*system, *chosen[key]] for system, key in zip(steering, group, strict=True)]
        found = work.run(name, lambda name=name, histories=histories: writer.invent(histories, settings, name))  # type: ignore[misc]
        for key, text in zip(group, found, strict=True):
            if text is not None and normalised(text) != normalised(turns[key][0]):
                asked[key] = [*chosen[key], {"role": "user", "content": text}]
    return asked


def synthesize(settings: Settings) -> None:
    """Write the conversations, sorted by id. The work file is removed once they are in place."""
    if settings.out.is_dir():
        raise HeadwayError(f"{settings.out}: --out is a folder; give a file name")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    writer = Author(Target.load(settings.target, settings.dtype, settings.device), settings.batch_size)
    seeds = Seeds(settings.system, settings.topics, settings.language, settings.openings)
    header = {key: str(value) for key, value in asdict(settings).items() if key not in ("target", "out")}
    header |= {"topics": str(seeds.topics), "openings": str(seeds.openings)}  # a file's content, not its name
    header["fingerprint"] = writer.target.fingerprint
    with Work(settings.out.with_name(f"{settings.out.name}.work"), header) as work:
        turns = opening_turns(writer, work, settings, seeds)
        opened = {
            key: [*(seed.turn() if settings.keep_system else []), {"role": "user", "content": text}]
            for key, (text, seed) in turns.items()
        }
        answered = exchange(writer, work, settings, "answers", opened)
        asked = second_turns(writer, work, settings, answered, turns)
        answered |= exchange(writer, work, settings, "second answers", asked)
        rows = [
            {"id": key, "messages": messages, "finish_reason": finish}
            for key, (messages, finish) in sorted(answered.items())
        ]
        atomic_write_text(settings.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        work.remove()
    cut = sum(row["finish_reason"] == "length" for row in rows)
    print(
        f"{settings.out}: {len(rows)} conversations, {settings.out.stat().st_size:,} bytes, {cut} cut at "
        f"{settings.max_answer_tokens} tokens; {len(turns) - len(rows)} left out, whose text is not tokenised to what "
        "the target wrote"
    )


def main() -> None:
    """Parse the command line and write."""
    parser = ArgumentParser(description="Let the target write its own conversations.", exit_on_error=False)
    parser.add_argument("--keep_system", action="store_true", help="leave the system turn that steers in place")
    parser.add_class_arguments(Settings, skip={"keep_system"})
    synthesize(Settings(**parse_arguments(parser).as_dict()))


if __name__ == "__main__":
    run_script(main)
