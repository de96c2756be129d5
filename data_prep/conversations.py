"""Conversations as text, as token ids, and which of those ids the target itself wrote.

    python data_prep/conversations.py show FILE --row N [--target NAME]

One conversation is one JSON line: {"id", "messages": [{"role", "content"}, ...], "finish_reason": "stop" | "length"}.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jsonargparse import ArgumentError, ArgumentParser

from heads.errors import HeadwayError, run_script
from heads.target import DEFAULT_TARGET

SAMPLES = Path(__file__).resolve().parent / "samples" / "smollm2-conversations.jsonl"
ROLES = ("system", "developer", "user", "assistant", "tool")
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Conversation:
    """Chat turns under a stable id. `finish_reason` "length": the last answer was cut, so it has no terminator."""

    id: str
    messages: list[dict[str, Any]]
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation; `turn[t]` is 0 where token t is not supervised, and k where it belongs to the
    k-th assistant turn (from 1), the turn's terminator included."""

    ids: list[int]
    turn: list[int]


def read_conversations(path: str | Path) -> list[Conversation]:
    """The conversations of a JSON lines file, in its order; a row without an id gets one from its content.

    Raises HeadwayError, with file, line and remedy, for anything that is not such a file: nothing is skipped but blank
    lines.
    """
    path = Path(path)
    conversations: list[Conversation] = []
    lines: dict[str, int] = {}
    for number, raw in _lines(path):
        where = f"{path}: line {number}"
        conversation = parse_conversation(_parse_json(raw, where), where)
        first = lines.setdefault(conversation.id, number)
        if first != number:
            raise HeadwayError(
                f"{where}: id '{conversation.id}' is that of line {first} already; remove one of them or rename its id"
            )
        conversations.append(conversation)
    if not conversations:
        raise HeadwayError(f"{path}: the file is empty; give one conversation a line, as JSON with 'messages'")
    return conversations


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise HeadwayError(f"{path}: {what}; give a JSON lines file of conversations")
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.strip():
                yield number, line


def _parse_json(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise HeadwayError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise HeadwayError(
            f"{where}: malformed JSON at column {error.colno} ({error.msg}); mend or remove the line"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep; a number of too many digits
        raise HeadwayError(f"{where}: JSON that cannot be read ({error}); mend or remove the line") from error


def parse_conversation(row: Any, where: str) -> Conversation:
    """One row as a Conversation. `where` names it in errors.

    Raises HeadwayError for a missing or wrong field, an unknown role, or no assistant turn to learn from.
    """
    if not isinstance(row, dict):
        raise HeadwayError(f"{where}: {_kind(row)} instead of an object; write {{'messages': [...]}}")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        what = "no 'messages'" if messages is None else "'messages' is not a list of at least one message"
        raise HeadwayError(f"{where}: {what}; write 'messages': [{{'role': 'user', 'content': ...}}, ...]")
    for number, message in enumerate(messages, 1):
        _check_message(message, f"{where}: message {number}")
    if row.get("tools"):
        raise HeadwayError(f"{where}: 'tools' are not rendered yet; remove the row")
    if all(message["role"] != "assistant" for message in messages):
        raise HeadwayError(f"{where}: no assistant turn, so nothing to learn; add the answer or remove the line")
    finish = row.get("finish_reason", "stop")
    if finish not in FINISH_REASONS:
        raise HeadwayError(f"{where}: finish_reason {finish!r}; it is 'stop', or 'length' for a cut last answer")
    if finish == "length" and messages[-1]["role"] != "assistant":
        raise HeadwayError(
            f"{where}: finish_reason 'length' says that the last answer was cut, but the last message is the "
            f"{messages[-1]['role']}'s; put 'stop' or remove what follows the answer"
        )
    return Conversation(_id(row, where), messages, finish)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise HeadwayError(f"{where}: {_kind(message)} instead of an object; write {{'role': ..., 'content': ...}}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise HeadwayError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise HeadwayError(f"{where}: 'content' is {_kind(content)}; it must be a string")
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise HeadwayError(f"{where}: half a surrogate pair, which is no character; mend or remove the line")


def _id(row: dict[str, Any], where: str) -> str:
    given = row.get("id")
    if given is None:
        text = json.dumps([row["messages"], row.get("finish_reason", "stop")], sort_keys=True)
        return f"row-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not isinstance(given, str) or not given.strip():
        raise HeadwayError(f"{where}: 'id' is {_kind(given)}; give a string that is not blank, or leave it out")
    return given


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return "missing or null" if value is None else names[type(value)]


def split_heldout(conversations: Iterable[Conversation], count: int) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out): held out are the `count` conversations with the smallest SHA-256 of their id, in that
    order, so that neither the file's order nor rows added with larger hashes change them; training keeps its order.

    Raises HeadwayError for a negative `count`, or one that leaves nothing to train on.
    """
    everything = list(conversations)
    if not 0 <= count < len(everything):
        raise HeadwayError(
            f"{count} conversations to hold out of {len(everything)}: give a number from 0 to {len(everything) - 1}"
        )
    heldout = sorted(everything, key=lambda each: hashlib.sha256(each.id.encode()).hexdigest())[:count]
    ids = {each.id for each in heldout}
    return [each for each in everything if each.id not in ids], heldout


def render(
    tokenizer: Any, conversation: Conversation, stop_ids: Sequence[int], max_length: int | None = None
) -> Rendered:
    """A conversation through the tokenizer's chat template, cut to `max_length` tokens.

    Supervised is what the target wrote after a generation prompt: the tokens that lie wholly between the end of that
    prompt and the end of the turn, up to its last stop token. White space that the template puts behind it is not,
    and neither is what the generation prompt itself supplies (an empty think block). The bounds come from rendering
    prefixes of the conversation, never from searching its text.

    Raises HeadwayError when the template does not render a prefix of the conversation to a prefix of its text, or
    ends no turn with a stop token.
    """
    where = f"conversation '{conversation.id}'"
    if not tokenizer.is_fast:
        raise HeadwayError(f"{where}: {type(tokenizer).__name__} gives no token offsets; use a fast tokenizer")
    text = _template(tokenizer, conversation.messages, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    extents = list(_extents(encoded["offset_mapping"]))
    turn, length, stops = [0] * len(ids), len(ids), set(stop_ids)
    for number, (start, end) in enumerate(_spans(tokenizer, conversation, text, where), 1):
        inside = [t for t, (first, last) in enumerate(extents) if start <= first and last <= end]
        terminators = [t for t in inside if ids[t] in stops]
        if not terminators:
            raise HeadwayError(
                f"{where}, assistant turn {number}: the chat template ends it with none of the target's stop tokens "
                f"{sorted(stops)}; name the one it uses in generation_config.json"
            )
        for t in inside:
            turn[t] = number if t <= terminators[-1] else 0
        length = terminators[-1]
    if conversation.finish_reason != "length":
        length = len(ids)
    if max_length is not None:
        length = min(length, max_length)
    return Rendered(ids[:length], turn[:length])


def _spans(tokenizer: Any, conversation: Conversation, text: str, where: str) -> Iterator[tuple[int, int]]:
    """Where, in `text`, each assistant turn begins and ends, in characters."""
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        prompt = _template(tokenizer, conversation.messages[:index], where, add_generation_prompt=True)
        through = _template(tokenizer, conversation.messages[: index + 1], where)
        if not (text.startswith(through) and through.startswith(prompt)):
            raise HeadwayError(
                f"{where}, message {index + 1}: the chat template strips or rewrites earlier turns, or starts an "
                "answer otherwise than its generation prompt, so what the target wrote cannot be told; cut the "
                "conversation after that answer, remove it, or use another template"
            )
        yield len(prompt), len(through)


def _extents(offsets: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Characters of each token. Byte-level tokenizers may leave the blank that a token starts with out of its offset;
    it is the token's all the same, and the one before an answer can be the template's."""
    before = 0
    for start, end in offsets:
        yield min(start, before), end
        before = end


def prompt_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Ids of `messages` with the generation prompt: what the target answers. Raises HeadwayError as `render` does."""
    text = _template(tokenizer, messages, "prompt", add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _template(
    tokenizer: Any, messages: list[dict[str, Any]], where: str, *, add_generation_prompt: bool = False
) -> str:
    if not tokenizer.chat_template:
        raise HeadwayError(f"{where}: the target's tokenizer has no chat template; use a chat model")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise HeadwayError(
            f"{where}: the chat template refuses {len(messages)} of its messages ({error}); remove the conversation"
        ) from error


def show(file: str, row: int, target: str) -> None:
    """Print conversation number `row` (from 1) of a file with its supervised tokens coloured, and their share."""
    import torch
    from rich.console import Console
    from rich.text import Text

    from data_prep.plan import describe  # it imports this module

    conversations = read_conversations(file)
    if not 1 <= row <= len(conversations):
        raise HeadwayError(f"{file}: --row {row}: it has rows 1 to {len(conversations)}")
    source = describe(target, "auto", torch.device("cpu"))
    rendered = render(source.tokenizer, conversations[row - 1], source.stop_ids)
    text = Text()
    for turn, run in groupby(zip(rendered.ids, rendered.turn, strict=True), key=lambda token: token[1]):
        text.append(source.tokenizer.decode([token for token, _ in run]), style="bold green" if turn else "dim")
    supervised, tokens = sum(map(bool, rendered.turn)), len(rendered.ids)
    text.append(
        f"\n{conversations[row - 1].id}: {supervised} of {tokens} tokens supervised ({supervised / tokens:.1%})"
    )
    Console().print(text)


def main() -> None:
    """Parse the command line and show."""
    parser = ArgumentParser(description="Look at conversations.", exit_on_error=False)
    shower = ArgumentParser(exit_on_error=False)
    shower.add_argument("file", type=str, help="JSON lines file of conversations")
    shower.add_argument("--row", type=int, required=True, help="which one, from 1")
    shower.add_argument("--target", type=str, default=DEFAULT_TARGET, help="embedded name, local folder or Hub id")
    parser.add_subcommands(required=True).add_subcommand("show", shower, help="print one, supervised tokens coloured")
    try:
        chosen = parser.parse_args(sys.argv[1:]).show
    except ArgumentError as error:
        raise HeadwayError(f"{error}; see --help") from error
    show(chosen.file, chosen.row, chosen.target)


if __name__ == "__main__":
    run_script(main)
