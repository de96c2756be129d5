"""Formats of other people's data: each by hand, misfits by their reason, and no meaning changed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import Sieve, Tally, load_prompts
from data_prep.recognise import Misfit, recognise
from heads.errors import HeadwayError
from tests.data_prep.foreign_rows import CALLED, FORMATS, TALK, TOOL, Row, assistant, call, system, user


@pytest.mark.parametrize(("row", "expected"), FORMATS, ids=range(len(FORMATS)))
def test_formats(row: Row, expected: list[Row]) -> None:
    assert recognise(row).messages == expected


@pytest.mark.parametrize(
    "row",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"functions": [TOOL["function"]]},
    ],
)
def test_tools(row: Row) -> None:
    asked = [
        user("Weather in Rome?"),
        assistant("", tool_calls=[call('{"city": "Rome"}', id="c1", type="function")]) | {"content": None},
        {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "weather", "cost": 3},
    ]
    chat = recognise({"messages": asked} | row)
    assert chat.tools == [TOOL]
    assert chat.messages[1] == assistant("", tool_calls=[CALLED | {"id": "c1"}])
    assert chat.messages[2] == {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "weather"}
    legacy = [asked[0], {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    assert recognise({"messages": legacy}).messages[1] == assistant("", tool_calls=[CALLED])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([user("a")], "no object"),
        ({"title": "a"}, "known fields"),
        ({"messages": []}, "empty"),
        ({"messages": "a"}, "no list"),
        ({"messages": ["a"]}, "turn is no object"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts that are no text"),
        ({"messages": [user(" \n")]}, "blank user turn"),
        ({"messages": [user("a"), {"role": "user", "content": None}]}, "blank user turn"),
        ({"messages": [assistant("b"), *TALK]}, "begins with"),
        ({"messages": [system("s"), assistant("b"), user("a")]}, "begins with"),
        ({"messages": [system("s")]}, "no user turn"),
        ({"messages": [system("s"), user("a")], "system": "t"}, "two different system turns"),
        ({"messages": [user("a")], "tools": "weather"}, "'tools'"),
        ({"messages": [user("a")], "functions": 5}, "'functions'"),
        ({"messages": [user("a")], "functions": "weather"}, "'functions'"),
        ({"messages": [user("a")], "functions": {"name": "weather"}}, "'functions'"),
        ({"messages": [user("a")], "tools": [{"most": float("inf")}]}, "not finite"),
        ({"messages": [user("a"), assistant("", tool_calls=[call('{"most": NaN}')])]}, "arguments"),
        ({"messages": [user("a"), assistant("", tool_calls=[call('{"city": "Rome", "city": "Oslo"}')])]}, "arguments"),
        ({"messages": [user("a"), assistant("", tool_calls=[call('{"most": 1e999}')])]}, "not finite"),
        ({"custom_id": "\ud83d", "body": {"messages": [user("a")]}}, "surrogate"),
        ({"messages": [user("a"), assistant("", tool_calls=[call("Rome")])]}, "arguments"),
        ({"messages": [user("a"), assistant("", tool_calls=[{"id": "c"}])]}, "function name"),
        ({"messages": [user("\ud83d")]}, "surrogate"),
        ({"messages": [user("a")], "tools": [{"name": "\ud83d"}]}, "surrogate"),
        ({"messages": [user("a")], "tools": [{"made": datetime(2026, 1, 1)}]}, "values that JSON has not"),
        ({"prompt": [15496, 995]}, "turn is no object"),
        ({"instruction": "do", "input": ["this"]}, "'input' is no text"),
        ({"question": {"text": "q?"}}, "'question' is no text"),
        ({"turns": ["a", None]}, "turn is no object"),
    ],
)
def test_misfits(row: Any, says: str) -> None:
    with pytest.raises(Misfit, match=says):
        recognise(row)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(each)


def spoil(source: random.Random, value: Any) -> Any:
    """The value with something in it dropped, doubled, or replaced by another type."""
    odd: list[Any] = [
        None,
        "",
        " ",
        3,
        True,
        [],
        {},
        ["a", None],
        {"role": "user"},
        "日本 \u200d",
        "\ud800",
        "{",
        "a\r\n",
    ]
    if source.random() < 0.15:
        return source.choice(odd)
    if isinstance(value, dict) and value:
        key = source.choice(list(value))
        return (
            value | {key: spoil(source, value[key])}
            if source.random() < 0.8
            else {k: value[k] for k in value if k != key}
        )
    if isinstance(value, list) and value:
        at = source.randrange(len(value))
        return [*value[:at], spoil(source, value[at]), *value[at + (source.random() < 0.8) :]]
    return source.choice(odd)


def test_fuzz(tmp_path: Path) -> None:
    """Of spoilt rows each is kept or counted, and every text of a kept one stands in the row, whole."""
    source, path = random.Random(3), tmp_path / "s.jsonl"
    kept = 0
    for _ in range(200):
        rows = [spoil(source, source.choice(FORMATS)[0]) for _ in range(5)]
        content = "\n".join(json.dumps(row) for row in rows).encode()
        if source.random() < 0.3:
            at = source.randrange(len(content))
            content = content[:at] + source.choice([b"", b"\xff", b"\x00", b'"', b"\xf0\x9f"]) + content[at + 1 :]
        path.write_bytes(content)
        lines = {f"{path}, line {n}": line for n, line in enumerate(content.split(b"\n"), 1) if line.strip()}
        tally = Tally()
        if content.startswith(b"["):  # one document, by its first byte
            with contextlib.suppress(HeadwayError):
                list(load_prompts([str(path)], "train", Sieve(), tally))
            continue
        found = list(load_prompts([str(path)], "train", Sieve(), tally))
        assert len(found) + tally.left_out.total() == len(lines)
        kept += len(found)
        for prompt in found:
            row = json.loads(lines[prompt.source])
            whole = {*strings(row), *(text for each in strings(row) for text in strings(_json(each))), ""}
            joined = {one + between + other for one in whole for other in whole for between in ("\n", "\n\n")}
            assert {message["content"] for message in prompt.messages} <= whole | joined
    assert kept > 200


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
