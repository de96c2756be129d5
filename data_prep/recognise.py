"""Rows as other people keep them, read as chat messages.

| a row holds | it becomes |
|---|---|
| `messages`, `conversations`, `conversation`; `turns` of objects | the turns, under `role` or `from`, `content` or `value` |
| `body`, `request`, `request_body`, `payload` (an object, or its JSON) | the logged request inside: chat or completion |
| `prompt` (a text, or messages), `completion` | user, assistant |
| `instruction`, `input` or `context` or `instances[0].input`, `output` | user (the two joined by an empty line), assistant |
| `question`, `context`, `answer` | the same |
| `turns` of texts | user turns |
| `text` | one user turn |

The first that is there counts, from the top. `system` or `system_prompt` is a leading system turn, `tools` or
`functions` are kept (also as JSON). Texts are taken as they are; nothing is searched for in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_prep import strict_json

Message = dict[str, Any]

SPEAKERS = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
CHATS = ("messages", "conversations", "conversation")
WRAPPERS = ("body", "request", "request_body", "payload")
ANSWERS = ("completion", "response", "output", "answer")


class Misfit(Exception):
    """Why a row is no conversation, in words that are the same for all rows of its kind."""


@dataclass(frozen=True)
class Chat:
    """Turns that begin with no assistant and hold a user turn, `tools` as the row gave them, `id` where it is a text."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    id: str | None


def recognise(row: Any) -> Chat:
    """A row of any format above. Raises Misfit for another, for blank user turns and for content that is no text."""
    if not isinstance(row, dict):
        raise Misfit("the row is no object")
    row = {key: value for key, value in row.items() if value is not None}
    messages = _messages(row)
    if messages is None:
        request = _request(row)
        if request is None:
            raise Misfit("none of the known fields")
        inner = recognise(request)
        return _sound(Chat(inner.messages, inner.tools, _identity(row, "custom_id", "id") or inner.id))
    messages = _with_system(row, messages)
    _check(messages)
    return _sound(Chat(messages, _tools(row), _identity(row, "id")))


def _sound(chat: Chat) -> Chat:
    """It, if it can be written as JSON. Raises Misfit."""
    try:
        json.dumps([chat.messages, chat.tools, chat.id], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise Misfit("half a surrogate pair, which is no character") from error
    except ValueError as error:
        raise Misfit("a number that is not finite") from error
    except (RecursionError, TypeError) as error:  # such as times, which only data sets hold
        raise Misfit("nested too deep, or values that JSON has not") from error
    return chat


def _messages(row: dict[str, Any]) -> list[Message] | None:
    for key in CHATS:
        if key in row:
            return _chat(row[key], key)
    if _request(row) is not None:
        return None
    for key, convert in FORMATS.items():
        if key in row:
            return convert(row)
    return None


def _request(row: dict[str, Any]) -> dict[str, Any] | None:
    """The request that a logged row wraps, however deep."""
    for key in WRAPPERS:
        value = row.get(key)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = _parsed(value)
        if isinstance(value, dict):
            if value.get("messages") is not None or value.get("prompt") is not None:
                return value
            inner = _request(value)
            if inner is not None:
                return inner
    return None


def _parsed(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError):
        return None


def _identity(row: dict[str, Any], *keys: str) -> str | None:
    """A text under one of `keys`. Numbers are taken for row numbers, which two files share."""
    return next((row[key] for key in keys if isinstance(row.get(key), str) and row[key].strip()), None)


def _prompt(row: dict[str, Any]) -> list[Message]:
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    asked = [_user(prompt, "prompt")] if isinstance(prompt, str) else _chat(prompt, "prompt")
    if isinstance(completion, list):
        return asked + _chat(completion, "completion")
    return asked + _answer(row)


def _question(key: str) -> Callable[[dict[str, Any]], list[Message]]:
    def convert(row: dict[str, Any]) -> list[Message]:
        row = _first_instance(row) | row
        asked = _user(row[key], key)
        for name in ("input", "context"):
            more = row.get(name, "")
            if not isinstance(more, str):
                raise Misfit(f"'{name}' is no text")
            if more.strip():
                asked["content"] += "\n\n" + more
        return [asked, *_answer(row)]

    return convert


def _first_instance(row: dict[str, Any]) -> dict[str, Any]:
    """`input` and `output` of a self-instruct task."""
    instances = row.get("instances")
    if not (isinstance(instances, list) and instances and isinstance(instances[0], dict)):
        return {}
    return {key: value for key, value in instances[0].items() if key in ("input", "output") and value is not None}


def _turns(row: dict[str, Any]) -> list[Message]:
    turns = row["turns"]
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [_user(turn, "turns") for turn in turns]
    return _chat(turns, "turns")


FORMATS: dict[str, Callable[[dict[str, Any]], list[Message]]] = {
    "prompt": _prompt,
    "instruction": _question("instruction"),
    "question": _question("question"),
    "turns": _turns,
    "text": lambda row: [_user(row["text"], "text")],
}


def _user(text: Any, key: str) -> Message:
    if not isinstance(text, str):
        raise Misfit(f"'{key}' is no text")
    return {"role": "user", "content": text}


def _answer(row: dict[str, Any]) -> list[Message]:
    """The answer that came along; it is replaced, so one of another type is no loss."""
    text = next((row[key] for key in ANSWERS if isinstance(row.get(key), str)), "")
    return [{"role": "assistant", "content": text}] if text.strip() else []


def _chat(turns: Any, key: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise Misfit(f"'{key}' is no list of turns, or an empty one")
    return [_turn(turn) for turn in turns]


def _turn(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Misfit("a turn is no object")
    turn = {key: value for key, value in turn.items() if value is not None}
    speaker = turn.get("role", turn.get("from"))
    if not isinstance(speaker, str) or speaker.lower() not in SPEAKERS:
        raise Misfit("a turn of an unknown role")
    role = SPEAKERS[speaker.lower()]
    content = _content(turn.get("content", turn.get("value", "")))
    if speaker.lower() == "function_call":
        return {"role": role, "content": "", "tool_calls": [_call({"function": _parsed(content)})]}
    message: Message = {"role": role, "content": content}
    calls = turn.get("tool_calls") or ([{"function": turn["function_call"]}] if turn.get("function_call") else [])
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise Misfit("'tool_calls' is no list")
        message["tool_calls"] = [_call(call) for call in calls]
    if role == "tool":
        message |= {name: turn[name] for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}
    return message


def _content(content: Any) -> str:
    """The text of a turn; of several parts, joined by line ends as serving engines do."""
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if any(kind not in ("text", "input_text", "output_text") for kind in kinds):
            raise Misfit("a turn holds parts that are no text")
        content = "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    if not isinstance(content, str):
        raise Misfit("the content of a turn is no text")
    return content


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what chat templates render."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Misfit("a tool call without a function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}")
    if not isinstance(arguments, dict):
        raise Misfit("the arguments of a tool call are no JSON object")
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return kept | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    functions = row.get("functions") or []
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise Misfit("'functions' is no list of objects")
    tools = row.get("tools") or [{"type": "function", "function": each} for each in functions]
    if isinstance(tools, str):
        tools = _parsed(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Misfit("'tools' is no list of objects")
    return tools


def _with_system(row: dict[str, Any], messages: list[Message]) -> list[Message]:
    system = row.get("system", row.get("system_prompt", ""))
    if not isinstance(system, str):
        raise Misfit("'system' is no text")
    if not system.strip() or messages[0] == {"role": "system", "content": system}:
        return messages
    if messages[0]["role"] == "system":
        raise Misfit("two different system turns")
    return [{"role": "system", "content": system}, *messages]


def _check(messages: list[Message]) -> None:
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise Misfit("no user turn")
    if next(role for role in roles if role not in ("system", "developer")) != "user":
        raise Misfit("begins with a turn that answers something left out")
    if any(message["role"] == "user" and not message["content"].strip() for message in messages):
        raise Misfit("a blank user turn")
