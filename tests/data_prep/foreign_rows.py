"""Rows of other people's data in every format that is recognised, and files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text} | more


def system(text: str) -> Row:
    return {"role": "system", "content": text}


def call(arguments: Any, **more: Any) -> Row:
    return {"function": {"name": "weather", "arguments": arguments}} | more


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


CALLED = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


TALK = [user("a"), assistant("b"), user("c")]


LOGGED = {"model": "m", "messages": TALK, "temperature": 0.3}


FORMATS: list[tuple[Row, list[Row]]] = [
    ({"messages": TALK}, TALK),
    ({"messages": [system("s"), *TALK], "prompt": "not this", "text": "nor this"}, [system("s"), *TALK]),
    ({"messages": None, "question": "q?"}, [user("q?")]),
    ({"messages": [{"role": "developer", "content": "d"}, user("a")]}, [{"role": "developer", "content": "d"}, user("a")]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, [user("a\nb")]),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "user", "value": "c"}]}, TALK),
    ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]}, [system("s"), user("a")]),
    ({"conversation": TALK, "language": "English"}, TALK),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
     [system("s"), user("a"), assistant("b")]),
    ({"conversations": [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "It is sunny."}]},
     [user("a"), assistant("", tool_calls=[CALLED]), {"role": "tool", "content": "sun"}, assistant("It is sunny.")]),
    ({"prompt": "a", "completion": "b"}, [user("a"), assistant("b")]),
    ({"prompt": ["a"]}, [user("a")]),
    ({"prompt": [system("s"), user("a")], "completion": [assistant("b")]}, [system("s"), user("a"), assistant("b")]),
    ({"prompt": "a", "response": "b"}, [user("a"), assistant("b")]),
    ({"instruction": "do", "input": "this", "output": "done"}, [user("do\n\nthis"), assistant("done")]),
    ({"instruction": "do", "input": "  ", "output": ""}, [user("do")]),
    ({"instruction": "do", "context": "this", "response": "done"}, [user("do\n\nthis"), assistant("done")]),
    ({"instruction": "do", "instances": [{"input": "this", "output": "done"}, {"input": "x", "output": "y"}]},
     [user("do\n\nthis"), assistant("done")]),
    ({"question": "q?", "answer": "#### 18"}, [user("q?"), assistant("#### 18")]),
    ({"system_prompt": "s", "question": "q?", "response": "r"}, [system("s"), user("q?"), assistant("r")]),
    ({"question": "q?", "answer": {"text": ["no text, and replaced anyway"]}}, [user("q?")]),
    ({"question_id": 81, "category": "writing", "turns": ["a", "c"]}, [user("a"), user("c")]),
    ({"turns": TALK}, TALK),
    ({"text": "### Human: a ### Assistant: b", "label": 1}, [user("### Human: a ### Assistant: b")]),
    (LOGGED, TALK),
    ({"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": LOGGED}, TALK),
    ({"request": {"headers": {}, "body": LOGGED}, "response": {"choices": []}}, TALK),
    ({"request_body": json.dumps(LOGGED), "status": 200}, TALK),
    ({"body": {"model": "m", "prompt": "a", "max_tokens": 3}}, [user("a")]),
    ({"text": "a", "body": "{ is no request"}, [user("a")]),
]  # fmt: skip


def put(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_bytes().decode().splitlines()]


def texts(path: Path) -> list[str]:
    return [row["messages"][0]["content"] for row in read(path)]
