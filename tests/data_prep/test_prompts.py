"""Prompts from other people's data: every format by hand, nothing lost or changed, nothing that is measured on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data_prep import prompts as script
from data_prep.conversations import read_conversations
from data_prep.prompts import Settings, Sieve, Tally, load_prompts, normalised, write_prompts
from data_prep.recognise import Misfit, recognise
from data_prep.sources import rows_of
from heads.errors import HeadwayError

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


# --- files


def put(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_bytes().decode().splitlines()]


def texts(path: Path) -> list[str]:
    return [row["messages"][0]["content"] for row in read(path)]


def test_one_meaning_in_every_kind_of_file(tmp_path: Path) -> None:
    """Rows with and without tools, system and calls, mixed, through JSON lines (CRLF, BOM), JSON, Parquet, a folder."""
    rows: list[Row] = [
        {"id": "plain", "messages": TALK},
        {
            "id": "tools",
            "messages": [
                system("s"),
                user("日本 🙂\r\n?"),
                assistant("", tool_calls=[call({"city": "Rome"}, type="function")]),
                {"role": "tool", "content": "sun"},
            ],
            "tools": [TOOL],
        },
        {"id": "other arguments", "messages": [user("z"), assistant("", tool_calls=[call({"unit": 1}, type="function")])]},
    ]  # fmt: skip
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "c.json").write_text("\n".join(lines), encoding="utf-8")
    Dataset.from_list([{"tools": None} | row for row in rows]).to_parquet(tmp_path / "d.parquet")
    put(tmp_path / "folder" / "train.jsonl", *rows)
    put(tmp_path / "folder" / "test.jsonl", {"question": "another split"})
    found = []
    for name in ("a.jsonl", "b.json", "c.json", "d.parquet", "folder"):
        write_prompts(Settings([str(tmp_path / name)], tmp_path / "out.jsonl"))
        found.append(read(tmp_path / "out.jsonl"))
    assert found[0] == [row | {"finish_reason": "unanswered"} for row in rows]
    for each in found:
        assert each == found[0]


def test_a_document_of_one_row(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps(LOGGED, indent=2))
    assert list(rows_of(str(tmp_path / "request.json"), "train")) == [(f"{tmp_path}/request.json, row 1", LOGGED)]


def test_rows_left_out_are_counted_and_the_first_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    lines = [b'{"question": "a"}', b'{"question": "b"', b"", b'{"question": "\xff"}', b'{"title": "c"}', b"nope",
             b'{"question": " A\xc2\xa0"}', b'{"question": "d"}', b"9" * 5000, b"[" * 9000]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    tally = write_prompts(Settings([str(path)], tmp_path / "out.jsonl"))
    assert texts(tmp_path / "out.jsonl") == ["a", "d"]
    assert tally.kept == {str(path): 2}
    assert tally.left_out == {
        "malformed JSON": 4,
        "not UTF-8": 1,
        "none of the known fields": 1,
        "the same user turns as an earlier row": 1,
    }
    assert tally.first["malformed JSON"] == f"{path}, line 2"
    assert tally.first["the same user turns as an earlier row"] == f"{path}, line 7"
    assert f"7 left out: 4 x malformed JSON (first: {path}, line 2)" in str(tally)


def test_nothing_is_written_when_nothing_fits(tmp_path: Path) -> None:
    source = put(tmp_path / "s.jsonl", {"title": "a"}, {"messages": []})
    with pytest.raises(
        HeadwayError, match=r"no row can be used; 2 left out: 1 x none of the known fields \(first: .*line 1"
    ):
        write_prompts(Settings([source], tmp_path / "out.jsonl"))
    with pytest.raises(HeadwayError, match="2 conversations to hold out of 1"):
        write_prompts(Settings([put(tmp_path / "s.jsonl", {"text": "a"})], tmp_path / "out.jsonl", held_out=2))
    assert [path.name for path in tmp_path.iterdir()] == ["s.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gone.jsonl", None, "there is no such file"),
        ("a.txt", b"a", "unknown kind of file"),
        ("a.json", b'[{"question": "a"}, ', "is no JSON"),
        ("a.json", b"[" * 9000, "is no JSON"),
        ("a.parquet", b"PAR1 and no more", "cannot be read"),
    ],
)
def test_broken_sources_are_refused(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadwayError, match=rf"{name}: {says}"):
        write_prompts(Settings([str(tmp_path / name)], tmp_path / "out.jsonl"))


def test_an_unknown_split_and_an_unreachable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "train.jsonl", {"question": "a"})
    with pytest.raises(HeadwayError, match=r"Bad split: dev.*--split"):
        list(rows_of(str(tmp_path), "dev"))
    asked: list[Row] = []

    def load(**arguments: Any) -> list[Row]:
        asked.append(arguments)
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(HeadwayError, match=r"org/set:main: cannot be read \(no network\)"):
        list(rows_of("org/set:main", "test"))
    assert asked == [{"path": "org/set", "name": "main", "split": "test", "streaming": True}]


# --- which are taken


def test_denied_prompts_never_pass(tmp_path: Path) -> None:
    bench = put(tmp_path / "bench.jsonl", {"turns": ["How many eggs?", "And now?"]}, {"question": "Ｗhy  not"})
    source = put(
        tmp_path / "s.jsonl",
        {"question": "how many EGGS?"},
        {"messages": [user("Hello"), assistant("How many eggs?"), user("and\nnow?")]},
        {"instruction": "Why", "input": "not"},
        {"text": "why not"},
        {"text": "How many eggs? Tell me."},
    )
    tally = write_prompts(Settings([source], tmp_path / "out.jsonl", deny=[bench]))
    assert texts(tmp_path / "out.jsonl") == ["How many eggs? Tell me."]
    # "Why\n\nnot" is "why not" to the eye, and to the list
    assert tally.left_out == {"has a user turn of the deny-list": 4}
    put(tmp_path / "bench.jsonl", {"turns": ["x"]}, {"title": "y"})
    with pytest.raises(HeadwayError, match=r"bench\.jsonl, line 2: none of the known fields, so it cannot be denied"):
        write_prompts(Settings([source], tmp_path / "out.jsonl", deny=[bench]))
    put(tmp_path / "bench.jsonl")
    with pytest.raises(HeadwayError, match=r"bench\.jsonl: has no row, so it denies nothing"):
        write_prompts(Settings([source], tmp_path / "out.jsonl", deny=[bench]))


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    source, held = put(tmp_path / "s.jsonl", {"text": "a"}), put(tmp_path / "t.heldout.jsonl", {"text": "b"})
    for changes in ({"out": tmp_path / "s.jsonl"}, {"out": tmp_path / "t.jsonl", "deny": [held]}):
        with pytest.raises(HeadwayError, match="would be written over"):
            Settings([source], **changes)


def test_tool_results_and_later_turns_tell_conversations_apart() -> None:
    sieve = Sieve()
    tool = [user("a"), assistant("", tool_calls=[CALLED]), {"role": "tool", "content": "sun"}]
    for messages in ([user("a")], [user("a"), user("b")], [user("ab")], tool):
        assert sieve.refuses(messages) is None
        assert sieve.refuses([system("new"), *messages, assistant("other")]) is not None


def test_ids(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "x"}, {"id": 7, "question": "b"}, {"id": "mine", "text": "c"}]
    first, second, third = _prompts(tmp_path, *rows)
    assert third == "mine"
    assert first.startswith("p-")
    assert [second, first] == _prompts(tmp_path, {"question": "b"}, {"question": "a", "answer": "another"})
    assert first not in _prompts(tmp_path, {"question": "a", "tools": [TOOL]}, {"system": "s", "question": "a!"})
    tally = Tally()
    put(tmp_path / "s.jsonl", {"id": "mine", "text": "c"}, {"id": "mine", "text": "d"})
    assert len(list(load_prompts([str(tmp_path / "s.jsonl")], "train", Sieve(), tally))) == 1
    assert tally.left_out == {"its id is another row's already": 1}


def _prompts(folder: Path, *rows: Row) -> list[str]:
    return [each.id for each in load_prompts([put(folder / "s.jsonl", *rows)], "train", Sieve(), Tally())]


def test_held_out_follows_the_hash_of_the_id(tmp_path: Path) -> None:
    source = put(tmp_path / "s.jsonl", *({"id": f"c{n}", "text": f"text {n}"} for n in range(20)))
    write_prompts(Settings([source], tmp_path / "out.jsonl", held_out=5))
    order = sorted((f"c{n}" for n in range(20)), key=lambda each: hashlib.sha256(each.encode()).hexdigest())
    kept, held = read(tmp_path / "out.jsonl"), read(tmp_path / "out.heldout.jsonl")
    assert {row["id"] for row in held} == set(order[:5])
    assert [row["id"] for row in kept] == [f"c{n}" for n in range(20) if f"c{n}" in order[5:]]


def test_without_any_held_out_an_older_file_of_them_goes(tmp_path: Path) -> None:
    """Its rows are among the prompts now: whoever measured on it would measure on what was trained on."""
    source = put(tmp_path / "s.jsonl", *({"id": f"c{n}", "text": f"text {n}"} for n in range(9)))
    write_prompts(Settings([source], tmp_path / "out.jsonl", held_out=2))
    write_prompts(Settings([source], tmp_path / "out.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "s.jsonl"]
    assert len(read(tmp_path / "out.jsonl")) == 9


def test_count_is_of_each_source_and_a_prompts_file_is_a_source(tmp_path: Path) -> None:
    one = put(tmp_path / "one.jsonl", *({"text": f"one {n}"} for n in range(6)))
    two = put(tmp_path / "two.jsonl", {"text": "two 0"}, {"text": "one 1"}, {"text": "two 1"}, {"text": "two 2"})
    tally = write_prompts(Settings([one, two], tmp_path / "out.jsonl", count=2))
    assert texts(tmp_path / "out.jsonl") == ["one 0", "one 1", "two 0", "two 1"]
    assert tally.kept == {one: 2, two: 2}
    write_prompts(Settings([str(tmp_path / "out.jsonl")], tmp_path / "again.jsonl"))
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_prompts_are_not_taken_for_the_targets_words(tmp_path: Path) -> None:
    source = put(tmp_path / "s.jsonl", {"prompt": "a", "completion": "somebody else's"})
    write_prompts(Settings([source], tmp_path / "out.jsonl"))
    with pytest.raises(HeadwayError, match="unanswered"):
        read_conversations(tmp_path / "out.jsonl")


@pytest.mark.parametrize(("changes", "says"), [({"count": 0}, "--count 0"), ({"held_out": -1}, "--held_out -1")])
def test_bad_settings(changes: Row, says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        Settings(["a.jsonl"], **changes)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = put(tmp_path / "1.jsonl", {"text": "a"}), put(tmp_path / "2.jsonl", {"text": "b"}, {"text": "c"})
    out = tmp_path / "new" / "out.jsonl"
    given = [
        "--source",
        one,
        two,
        "--deny",
        put(tmp_path / "3.jsonl", {"text": "C"}),
        "--out",
        str(out),
        "--held_out",
        "1",
    ]
    monkeypatch.setattr("sys.argv", ["prompts.py", *given])
    script.main()
    assert len(texts(out)) == 1
    said = f"{out}: 2 kept (1 of {one}, 1 of {two}); 1 left out: 1 x has a user turn of the deny-list (first: {two}, line 2)"
    assert f"{said}; 1 held out" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["prompts.py", "--out", str(out)])
    with pytest.raises(HeadwayError, match="source"):
        script.main()


# --- no meaning is changed


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


def test_normalised() -> None:
    assert normalised("  What IS\tthis\n?") == normalised("what is this ?") == "what is this ?"
