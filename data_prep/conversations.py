"""Conversations as text, as token ids, and which of those ids the target itself wrote.

    python data_prep/conversations.py show FILE --row N [--target NAME]

One conversation is one JSON line:

| field | holds |
|---|---|
| `messages` | [{"role", "content"}, ...]; an assistant's may have `tool_calls`, with content or without, and `reasoning_content` (or `thinking`, `reasoning`): what it thought before the content. Other fields are the template's to use |
| `id` | a text; else one is made of the content |
| `finish_reason` | "stop", or "length" where the last answer was cut |
| `tools` | list of tool schemas that the target was given |
| `template_options` | variables of the chat template when the answers were written, such as {"enable_thinking": false} |

All but `messages` may be missing or null, in any row. Content is what the target wrote, as it wrote it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

from jsonargparse import ArgumentParser

from data_prep import strict_json
from data_prep.message_text import REASONING
from data_prep.render import Rendered, prompt_ids, render, render_all
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, run_script
from heads.target import DEFAULT_TARGET

__all__ = [
    "SAMPLES",
    "Conversation",
    "Rendered",
    "parse_conversation",
    "prompt_ids",
    "read_conversations",
    "render",
    "render_all",
    "split_heldout",
]
SAMPLES = Path(__file__).resolve().parent / "samples" / "smollm2-conversations.jsonl"
ROLES = ("system", "developer", "user", "assistant", "tool")
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Conversation:
    """Chat turns under a stable id. `finish_reason` "length": the last answer was cut, so it has no terminator."""

    id: str
    messages: list[dict[str, Any]]
    finish_reason: str = "stop"
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)

    def content_hash(self) -> str:
        """Hex SHA-256 of all but the id."""
        content: list[Any] = [self.messages, self.finish_reason]
        if self.tools or self.template_options:
            content += [self.tools, self.template_options]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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


def _parse_json(text: str | bytes, where: str) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return strict_json.loads(text)
    except UnicodeDecodeError as error:
        raise HeadwayError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise HeadwayError(
            f"{where}: malformed JSON at column {error.colno} ({error.msg}); mend or remove the line"
        ) from error
    except (
        RecursionError,
        ValueError,
    ) as error:  # nested too deep; a number of too many digits; NaN, a field given twice
        raise HeadwayError(f"{where}: JSON that cannot be read ({error}); mend or remove the line") from error


def parse_conversation(row: Any, where: str) -> Conversation:
    """One row as a Conversation; optional fields that are null count as missing, and tool arguments given as a JSON
    text become the object that chat templates print. `where` names the row in errors.

    Raises HeadwayError for a missing or wrong field, an unknown role, or no assistant turn to learn from.
    """
    if not isinstance(row, dict):
        raise HeadwayError(f"{where}: {_kind(row)} instead of an object; write {{'messages': [...]}}")
    _check_values(row, where)
    given = row.get("messages")
    if not isinstance(given, list) or not given:
        what = "no 'messages'" if given is None else "'messages' is not a list of at least one message"
        raise HeadwayError(f"{where}: {what}; write 'messages': [{{'role': 'user', 'content': ...}}, ...]")
    messages = [_message(message, f"{where}: message {number}") for number, message in enumerate(given, 1)]
    if all(message["role"] != "assistant" for message in messages):
        raise HeadwayError(f"{where}: no assistant turn, so nothing to learn; add the answer or remove the line")
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise HeadwayError(f"{where}: 'tools' is not a list of objects; give the tools' schemas, or leave it out")
    options = {} if row.get("template_options") is None else row["template_options"]
    if not isinstance(options, dict):
        raise HeadwayError(f"{where}: 'template_options' is {_kind(options)}; give an object, or leave it out")
    unnamed = Conversation("", messages, _finish_reason(row, messages[-1], where), tools, options)
    return replace(unnamed, id=_id(row, where) or f"row-{unnamed.content_hash()[:16]}")


def _check_values(value: Any, where: str) -> None:
    try:
        strict_json.check_values(value)
    except ValueError as error:
        raise HeadwayError(f"{where}: {error}; mend or remove the line") from error


def _finish_reason(row: dict[str, Any], last: dict[str, Any], where: str) -> str:
    finish = "stop" if row.get("finish_reason") is None else row["finish_reason"]
    if finish not in FINISH_REASONS:
        raise HeadwayError(f"{where}: finish_reason {short(finish)}; it is 'stop', or 'length' for a cut last answer")
    if finish == "length" and last["role"] != "assistant":
        raise HeadwayError(
            f"{where}: finish_reason 'length' says that the last answer was cut, but the last message is the "
            f"{last['role']}'s; put 'stop' or remove what follows the answer"
        )
    if finish == "length" and last.get("tool_calls"):
        raise HeadwayError(
            f"{where}: finish_reason 'length' says that the last answer was cut, but it has whole tool calls; put "
            "'stop', or what was written of them into the content"
        )
    return finish


def _message(given: Any, where: str) -> dict[str, Any]:
    """A checked copy without the fields that are null, except the content of an assistant."""
    if not isinstance(given, dict):
        raise HeadwayError(f"{where}: {_kind(given)} instead of an object; write {{'role': ..., 'content': ...}}")
    message = {key: value for key, value in given.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise HeadwayError(f"{where}: unknown role {short(role)}; use one of {', '.join(ROLES)}")
    thoughts = [message[name] for name in REASONING if name in message]
    if any(not isinstance(thought, str) or thought != thoughts[0] for thought in thoughts):
        raise HeadwayError(f"{where}: {' and '.join(REASONING)} are names of one string; give it once")
    calls = message.pop("tool_calls", None) or []
    if role != "assistant" and (calls or thoughts):
        raise HeadwayError(f"{where}: thoughts or tool calls of the {role}'s; they are the assistant's to have")
    if content is None and (calls or any(thoughts)):
        return message | _tool_calls(calls, where) | {"content": None}
    if not isinstance(content, str):
        raise HeadwayError(f"{where}: 'content' is {_kind(content)}; it must be a string")
    return message | _tool_calls(calls, where)


def _tool_calls(calls: Any, where: str) -> dict[str, Any]:
    """The field `tool_calls`, checked, none where there are none."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise HeadwayError(f"{where}: 'tool_calls' is not a list of objects; write [{{'function': ...}}]")
    checked = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise HeadwayError(f"{where}: a tool call without a name; write {{'function': {{'name': ..., ...}}}}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parse_json(arguments or "{}", f"{where}: arguments of tool '{function['name']}'")
            _check_values({"arguments": arguments}, where)
        if arguments is not None and not isinstance(arguments, dict):
            raise HeadwayError(f"{where}: the arguments of tool '{function['name']}' are not an object; write one")
        whole = function | {"arguments": arguments or {}}
        checked.append(call | {"function": whole} if "function" in call else whole)
    return {"tool_calls": checked} if checked else {}


def _id(row: dict[str, Any], where: str) -> str | None:
    given = row.get("id")
    if given is not None and (not isinstance(given, str) or not given.strip()):
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


def main() -> None:
    """Parse the command line and show."""
    from data_prep.show import show  # it imports this module

    parser = ArgumentParser(description="Look at conversations.", exit_on_error=False)
    shower = ArgumentParser(exit_on_error=False)
    shower.add_argument("file", type=Path, help="JSON lines file of conversations")
    shower.add_argument("--row", type=int, required=True, help="which one, from 1")
    shower.add_argument("--html", type=Path | None, help="write a page there instead of printing")
    shower.add_argument("--target", type=str, default=DEFAULT_TARGET, help="embedded name, local folder or Hub id")
    parser.add_subcommands(required=True).add_subcommand("show", shower, help="show one, supervised tokens coloured")
    chosen = parse_arguments(parser).show
    show(chosen.file, chosen.row, chosen.target, chosen.html)


if __name__ == "__main__":
    run_script(main)
