"""Conversations: what a row may hold, every refusal, a stable split."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from data_prep.conversations import (
    SAMPLES,
    Conversation,
    parse_conversation,
    read_conversations,
    split_heldout,
)
from heads.errors import HeadwayError

TURNS = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]


GOOD: dict[str, Any] = {"id": "a", "messages": TURNS[:2]}


def rows(*changes: dict[str, Any] | bytes) -> bytes:
    """File content: bytes as they are, dicts as GOOD with changes."""
    return b"\n".join(c if isinstance(c, bytes) else json.dumps(GOOD | c).encode() for c in changes) + b"\n"


def asking(fields: dict[str, Any]) -> dict[str, Any]:
    """A change of GOOD: fields of its answer."""
    return {"messages": [TURNS[0], TURNS[1] | fields]}


def calling(arguments: Any) -> dict[str, Any]:
    return asking({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})


BAD = {
    "malformed at line 7": (rows(*({"id": f"r{n}"} for n in range(6)), b'{"messages": ['), "line 7: malformed JSON"),
    "empty": (b"", "the file is empty"),
    "blank": (b"\n \n", "the file is empty"),
    "not an object": (rows({}, b"[1]"), "line 2: a list instead of an object"),
    "no messages": (b'{"id": "a"}', "line 1: no 'messages'"),
    "empty messages": (rows({"messages": []}), "line 1: 'messages' is not a list"),
    "messages a string": (rows({"messages": "hi"}), "line 1: 'messages' is not a list"),
    "message a string": (rows({"messages": ["hi"]}), "line 1: message 1: a string instead of an object"),
    "unknown role": (rows({"messages": [{"role": "bot", "content": ""}]}), "message 1: unknown role 'bot'"),
    "role a list": (rows({"messages": [{"role": ["user"], "content": ""}]}), "message 1: unknown role"),
    "no content": (rows({"messages": [{"role": "user"}]}), "message 1: 'content' is missing"),
    "content a list": (rows({"messages": [{"role": "user", "content": []}]}), "'content' is a list"),
    "half a surrogate": (rows({"messages": [{"role": "user", "content": "\ud83c"}]}), "half a surrogate"),
    "no answer": (rows({}, {"id": "b", "messages": TURNS[:1]}), "line 2: no assistant turn"),
    "finish": (rows({"finish_reason": "eos"}), "line 1: finish_reason 'eos'"),
    "finish a list": (rows({"finish_reason": ["stop"]}), r"line 1: finish_reason \['stop'\]"),
    "length without answer": (
        rows({"messages": TURNS[:3], "finish_reason": "length"}),
        "the last message is the user's",
    ),
    "tools an object": (rows({"tools": {"name": "f"}}), "line 1: 'tools' is not a list of objects"),
    "tools of strings": (rows({"tools": ["f"]}), "line 1: 'tools' is not a list of objects"),
    "options a list": (rows({"template_options": [1]}), "line 1: 'template_options' is a list"),
    "calls an object": (
        rows(asking({"tool_calls": {"name": "f"}})),
        "message 2: 'tool_calls' is not a list of objects",
    ),
    "a call without a name": (rows(asking({"tool_calls": [{"function": {}}]})), "a tool call without a name"),
    "arguments a list": (rows(calling([1])), "the arguments of tool 'f' are not an object"),
    "arguments broken": (rows(calling('{"a": ')), "arguments of tool 'f': malformed JSON at column 7"),
    "arguments not finite": (rows(calling('{"a": [1e999]}')), "message 2: a number that is not finite"),
    "calls of the user's": (
        rows({"messages": [TURNS[0] | {"tool_calls": [{"name": "f"}]}, TURNS[1]]}),
        "of the user's",
    ),
    "thoughts of the user's": (rows({"messages": [TURNS[0] | {"thinking": "hm"}, TURNS[1]]}), "of the user's"),
    "two thoughts": (rows(asking({"thinking": "hm", "reasoning": "hmm"})), "are names of one string"),
    "thoughts a list": (rows(asking({"reasoning_content": ["hm"]})), "are names of one string"),
    "nothing said": (rows(asking({"content": None})), "message 2: 'content' is missing or null"),
    "a cut call": (rows(asking({"tool_calls": [{"name": "f"}]}) | {"finish_reason": "length"}), "has whole tool calls"),
    "a field twice": (
        rows(b'{"messages": [], "id": "a", "messages": 1}'),
        "line 1: .*field 'messages' is given twice",
    ),
    "twice, deeper": (rows(b'{"messages": [{"role": "user", "role": "tool"}]}'), "field 'role' is given twice"),
    "NaN": (rows(b'{"messages": 1, "score": NaN}'), "line 1: .*NaN is no JSON"),
    "endless": (rows(b'{"messages": 1, "score": 1e999}'), "line 1: a number that is not finite"),
    "half a surrogate in the id": (rows({"id": "\ud83c"}), "half a surrogate"),
    "half a surrogate in a name": (rows({"template_options": {"\ud83c": 1}}), "half a surrogate"),
    "nested": (rows(b'{"messages": [], "a": ' + b"[" * 70 + b"]" * 70 + b"}"), "line 1: nested more than 64 deep"),
    "a long role": (rows({"messages": [{"role": "r" * 9999, "content": ""}]}), r"role 'r{12}\.\.\.r{13}'"),
    "id a number": (rows({"id": 3}), "line 1: 'id' is a number"),
    "id blank": (rows({"id": " "}), "line 1: 'id' is a string"),
    "same id": (rows({}, {"id": "b"}, b"", {}), "line 4: id 'a' is that of line 1"),
    "same content": (rows({"id": None}, {"id": None}), "line 2: id 'row-.*' is that of line 1"),
    "bad UTF-8": (rows({}, b'{"id": "\xff"}'), "line 2: byte 9 is not UTF-8"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), "line 1: byte 1 is not UTF-8"),
    "too deep": (b"[" * 200_000, "line 1: "),
    "too many digits": (b'{"id": ' + b"1" * 10_000 + b"}", "line 1: "),
    "two in a line": (rows(b"{} {}"), "line 1: malformed JSON at column 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(tmp_path: Path, name: str) -> None:
    content, says = BAD[name]
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(HeadwayError, match=says) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no such file"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(HeadwayError, match="is a folder"):
        read_conversations(tmp_path)


def test_odd_but_good_files(tmp_path: Path) -> None:
    text = "日本 🎈\u2028\u0000 é"
    messages = [TURNS[0], {"role": "assistant", "content": text, "extra": [1]}]
    path = tmp_path / "some.jsonl"
    lines = [json.dumps({"messages": messages, "source": 1}), "", json.dumps(GOOD | {"finish_reason": "length"})]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    first, second = read_conversations(path)
    assert (first.messages, first.finish_reason) == (messages, "stop")
    assert second == Conversation("a", TURNS[:2], "length")
    path.write_text(json.dumps({"source": 2, "messages": messages}, ensure_ascii=False), encoding="utf-8")
    assert read_conversations(path)[0].id == first.id  # the id depends on the content alone


def test_rows_with_and_without_optional_fields(tmp_path: Path) -> None:
    """Null is missing, whatever the field; an assistant's content stays null. Arguments as JSON text become objects."""
    null = {"tools": None, "template_options": None, "finish_reason": None}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "日"]}'}}
    flat = {"name": "g", "arguments": {}}
    full = [
        TURNS[0] | {"tool_calls": None, "reasoning_content": None, "name": None},
        {
            "role": "assistant",
            "content": None,
            "thinking": "hm",
            "tool_calls": [call, flat, {"function": {"name": "h"}}],
        },
        {"role": "tool", "content": "21", "tool_call_id": "c1"},
        TURNS[3] | {"tool_calls": []},
    ]
    tools, options = [{"type": "function", "function": {"name": "f"}}], {"enable_thinking": False}
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(rows({"id": "b"} | null, {"messages": full, "tools": tools, "template_options": options}))
    plain, rich = read_conversations(path)
    assert plain == Conversation("b", TURNS[:2], "stop", None, {})
    calls = [
        call | {"function": {"name": "f", "arguments": {"a": [1, "日"]}}},
        flat,
        {"function": {"name": "h", "arguments": {}}},
    ]
    messages = [
        TURNS[0],
        {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": calls},
        full[2],
        TURNS[3],
    ]
    assert rich == Conversation("a", messages, "stop", tools, options)


def test_an_id_made_of_the_content_covers_all_of_it() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"finish_reason": "length"}, {"tools": [{"name": "f"}]}, {"tools": [{"name": "g"}]},
        {"template_options": {"a": 1}}, asking({"thinking": "hm"}), asking({"content": "c"}),
    ]  # fmt: skip
    ids = [parse_conversation({"messages": TURNS[:2]} | change, "here").id for change in changes]
    assert len(set(ids)) == len(changes)
    assert parse_conversation({"messages": TURNS[:2], "tools": [], "note": 1}, "here").id == ids[0]


def test_heldout_is_stable() -> None:
    everything = [Conversation(f"id-{n}", TURNS[:2]) for n in range(200)]
    training, heldout = split_heldout(everything, 20)
    assert len(heldout) == 20
    assert {each.id for each in training} | {each.id for each in heldout} == {each.id for each in everything}
    assert training == [each for each in everything if each not in heldout]
    shuffled = random.Random(1).sample(everything, 200)
    assert split_heldout(shuffled, 20)[1] == heldout
    assert split_heldout(everything, 30)[1][:20] == heldout
    more = [*everything, *(Conversation(f"new-{n}", TURNS[:2]) for n in range(20))]
    kept = [each for each in split_heldout(more, 20)[1] if each.id.startswith("id-")]
    assert kept == heldout[: len(kept)]  # what is held out of the old rows never changes sides to others of them
    assert split_heldout(everything, 0) == (everything, [])
    for count in (-1, 200):
        with pytest.raises(HeadwayError, match="0 to 199"):
            split_heldout(everything, count)


def test_parse_conversation_keeps_what_the_template_may_need() -> None:
    messages = [{"role": "user", "content": "a", "name": "Ann"}, TURNS[1]]
    assert parse_conversation({"messages": messages}, "here").messages == messages


def test_bundled_set() -> None:
    samples = read_conversations(SAMPLES)
    assert 800 <= len(samples) <= 2000
    assert SAMPLES.stat().st_size <= 2_000_000
    assert [each.id for each in samples] == sorted(each.id for each in samples)
    assert all(message["content"].strip() for each in samples for message in each.messages)
