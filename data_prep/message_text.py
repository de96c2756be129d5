"""The texts of a message: which it holds, the message with them altered, and what two renderings share."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; transformers gives templates theirs


def put_back(own: str, content: str) -> str | None:
    """An answer's rendering with the white space that the template trimmed off its content; None where it does not end
    with the content. The target wrote that white space, whatever the template makes of it."""
    words, said = content.strip(), own.rstrip()
    if not words:
        return own[: len(own) - shared_end(own, content)] + content
    if not said.endswith(words) or not content[len(content.rstrip()) :].startswith(own[len(said) :]):
        return None
    before, leading = said[: len(said) - len(words)], content[: len(content) - len(content.lstrip())]
    return before[: len(before) - shared_end(before, leading)] + content


def shared_start(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_end(first: str, second: str) -> int:
    """How many characters two texts end with alike."""
    return shared_start(first[::-1], second[::-1])


def parts_of(message: Message) -> list[str]:
    """Which kinds of text a message holds."""
    parts = ["reasoning"] if any(message.get(name) for name in REASONING) else []
    parts += ["tool_calls"] if message.get("tool_calls") else []
    return [*parts, "content"] if message.get("content") or not parts else parts


def with_mark(message: Message, part: str, mark: str) -> Message:
    """The message with `mark` added to the end of a part."""
    if part == "reasoning":
        return message | {name: message[name] + mark for name in REASONING if message.get(name)}
    if part == "content":
        return message | {"content": (message.get("content") or "") + mark}
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        changed = function | {"arguments": marked(function.get("arguments") or {}, mark)}
        calls.append(call | {"function": changed} if "function" in call else changed)
    return message | {"tool_calls": calls}


def marked(value: Any, mark: str) -> Any:
    """`value` with `mark` at the end of each of its texts, names of fields included; other values become the mark."""
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {marked(key, mark): marked(each, mark) for key, each in (value or {"": ""}).items()}
    if isinstance(value, list):
        return [marked(each, mark) for each in value or [""]]
    return mark
