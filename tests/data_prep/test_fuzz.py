"""1,000 corrupted or odd files: read with their meaning, or refused with a reason, and nothing else.

The meaning is what an independent reader finds in the bytes. Each way to spoil a file says beforehand what must become
of it, where that can be known: "same" rows as before, "refused", or "either".
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.conversations import Conversation, read_conversations, render_all
from data_prep.prompts import Sieve, Tally, load_prompts
from heads.errors import HeadwayError
from tests.data_prep.chat_formats import FORMATS
from tests.data_prep.mask_oracle import stops_of, tokenizer_of

FILES = 1000
TEXTS = [
    "the cat sat", "", " on a mat \n", "日本語、你好", "🎈🏽👩\u200d👩\u200d👧", "é", "<|im_end|>", "\u2028\u2029\u0085", "\x00\x1b[31m\x07",
    "</think>", "\\u0041 \\n \"quoted\"", "{{ 7 * 7 }}{% raw %}", "\ufeff", "\r\n\r", "NaN", "\U0010ffff", "\u202eabc", "a\u0301",
]  # fmt: skip
WRONG = [None, True, False, 0, -1, 1.5, "", " ", "text", [], {}, [[]], [None], {"": None}, [{"role": 1}], 10**30]
Row = dict[str, Any]


def text(source: random.Random) -> str:
    return "".join(source.choices(TEXTS, k=source.randint(0, 4)))


def good_row(source: random.Random, number: int) -> Row:
    """A row that is right, with optional fields or without."""
    messages: list[Row] = [{"role": "system", "content": text(source)}] if source.random() < 0.3 else []
    row: Row = {"id": f"r{number}-{text(source)}", "messages": messages}
    if source.random() < 0.3:
        row["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"x": text(source)}}}]
    for turn in range(source.randint(1, 3)):
        messages.append({"role": "user", "content": f"{turn} of {number}: {text(source)}"})
        answer: Row = {"role": "assistant", "content": text(source)}
        if source.random() < 0.3:
            answer["reasoning_content"] = source.choice(["hm " + text(source), None])
        if row.get("tools") and source.random() < 0.5:
            arguments = {"x": text(source), "n": [1, None, 2.5]}
            given = source.choice([arguments, json.dumps(arguments)])
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": "c", "content": text(source)}]
        messages.append(answer)
    if source.random() < 0.3:
        row["finish_reason"] = source.choice(["stop", "length", None])
    if source.random() < 0.2:
        row["template_options"] = source.choice([None, {}, {"enable_thinking": False}])
    if source.random() < 0.2:
        del row["id"]
    return row | {"note": source.choice([1, [text(source)], {"a": None}])}


def dump(rows: list[Any], source: random.Random, end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=source.random() < 0.5) + end for row in rows).encode()


# --- ways to spoil a file: (source, rows) -> (bytes, what must become of it)

Spoiled = tuple[bytes, str]
Spoil = Callable[[random.Random, list[Row]], Spoiled]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value."""
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in pairs] + [place for _, each in pairs for place in places(each)]


def spoil_value(make: Callable[[random.Random], Any]) -> Spoil:
    def spoil(source: random.Random, rows: list[Row]) -> Spoiled:
        for _ in range(source.randint(1, 2)):
            container, key = source.choice(places(rows))
            container[key] = make(source)
        return dump(rows, source), "either"

    return spoil


def removed(source: random.Random, rows: list[Row]) -> Spoiled:
    container, key = source.choice(places(rows))
    del container[key]
    return dump(rows, source), "either"


def moved(source: random.Random, rows: list[Row]) -> Spoiled:
    """A value takes another's place."""
    (one, first), (other, second) = source.choice(places(rows)), source.choice(places(rows))
    one[first] = json.loads(json.dumps(other[second]))
    return dump(rows, source), "either"


def bytes_changed(source: random.Random, rows: list[Row]) -> Spoiled:
    content = bytearray(dump(rows, source))
    for _ in range(source.randint(1, 4)):
        content[source.randrange(len(content))] = source.randrange(256)
    return bytes(content), "either"


def bytes_lost(source: random.Random, rows: list[Row]) -> Spoiled:
    content = dump(rows, source)
    start = source.randrange(len(content))
    return content[:start] + content[start + source.randint(1, 40) :], "either"


def truncated(source: random.Random, rows: list[Row]) -> Spoiled:
    content = dump(rows, source)
    last = len(content[:-1].rpartition(b"\n")[0])  # within the last row
    return content[: source.randrange(last + 2, len(content) - 2)], "refused"


def not_utf8(source: random.Random, rows: list[Row]) -> Spoiled:
    content = dump(rows, source)
    at = content.index(b'"messages"')
    bad = source.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xe6\x97", b"\xf5\x80\x80\x80"])
    return content[: at + 1] + bad + content[at + 1 :], "refused"


def with_line_ends(end: str) -> Spoil:
    return lambda source, rows: (dump(rows, source, end), "same")


def blank_lines(source: random.Random, rows: list[Row]) -> Spoiled:
    return b"\n \n\t\r\n" + b"\n\n".join(dump([row], source) for row in rows), "same"


def with_mark(source: random.Random, rows: list[Row]) -> Spoiled:
    return b"\xef\xbb\xbf" + dump(rows, source), "same"


def no_last_line_end(source: random.Random, rows: list[Row]) -> Spoiled:
    return dump(rows, source).rstrip(b"\n"), "same"


def recoded(source: random.Random, rows: list[Row]) -> Spoiled:
    coding = source.choice(["utf-16", "utf-16-be", "utf-32", "utf-7"])
    return dump(rows, source).decode().encode(coding), "refused" if coding != "utf-7" else "either"


def spaced(source: random.Random, rows: list[Row]) -> Spoiled:
    lines = [json.dumps(row, separators=(" ,\t", "  :\r "), ensure_ascii=False) for row in rows]
    return "\n".join(f" \t{line} \r" for line in lines).encode(), "same"


def pretty(source: random.Random, rows: list[Row]) -> Spoiled:
    return json.dumps(rows[0], indent=1).encode(), "refused"


def as_one_list(source: random.Random, rows: list[Row]) -> Spoiled:
    return json.dumps(rows).encode(), "refused"


def two_in_a_line(source: random.Random, rows: list[Row]) -> Spoiled:
    return b"".join(dump(rows, source, source.choice([" ", ", ", ""])) for _ in range(2)), "refused"


def same_id(source: random.Random, rows: list[Row]) -> Spoiled:
    extra = good_row(source, 99) | {"id": "twice"}
    return dump([rows[0] | {"id": "twice"}, *rows[1:], extra], source), "refused"


def same_row(source: random.Random, rows: list[Row]) -> Spoiled:
    return dump([*rows, source.choice(rows)], source), "refused"


def same_key(source: random.Random, rows: list[Row]) -> Spoiled:
    line = json.dumps(rows[0])
    name = source.choice(['"role"', '"content"', '"messages"'])
    value = source.choice(['"user"', "[]", "null"])
    return (line.replace(name, f"{name}: {value}, {name}", 1)).encode(), "refused"


def surrogate(source: random.Random, rows: list[Row]) -> Spoiled:
    half = f"a{chr(source.choice([0xD800, 0xDBFF, 0xDC00, 0xDFFF]))}b"
    container, key = source.choice(
        [(rows[0], "id"), (source.choice(rows[0]["messages"]), "content"), (rows[0], "tools")]
    )
    container[key] = [{"name": "f", half: [half]}] if key == "tools" else half
    return json.dumps(rows[0]).encode(), "refused"


def foreign_fields(source: random.Random, rows: list[Row]) -> Spoiled:
    """Fields of other formats, of any type; a row with messages is read by them."""
    for name in source.sample(["conversations", "turns", "prompt", "completion", "text", "instances", "request"], 3):
        rows[0][name] = source.choice(WRONG)
    return dump(rows, source), "same"


def not_a_number(source: random.Random, rows: list[Row]) -> Spoiled:
    token = source.choice(["NaN", "Infinity", "-Infinity", "1e999", "-1e400"])
    where = source.choice(['"note"', '"tools"', '"template_options"', '"extra"'])
    row = {key: value for key, value in rows[0].items() if f'"{key}"' != where}
    return (json.dumps(row)[:-1] + f", {where}: [{{}}, {token}]}}").encode(), "refused"


def not_quite_json(source: random.Random, rows: list[Row]) -> Spoiled:
    line = json.dumps(rows[0])
    return source.choice(
        [line + "//", line[:-1] + ",}", line.replace('"', "'"), line.replace('"', "“", 1), "\x0c" + line, line + "\x00"]
    ).encode(), "refused"


def huge(source: random.Random, rows: list[Row]) -> Spoiled:
    rows[0]["messages"][-1]["content"] = source.choice(TEXTS[3:6]) * 20_000
    return dump(rows, source), "same"


def many_fields(source: random.Random, rows: list[Row]) -> Spoiled:
    rows[0]["messages"][0] |= {f"field {n}": n for n in range(3_000)}
    return dump(rows, source), "same"


def deep(source: random.Random, rows: list[Row]) -> Spoiled:
    depth = source.choice([70, 400, 2_000, 100_000])
    opening, closing = source.choice([("[", "]"), ('{"a":', "}")])
    inside = opening * depth + ("0" if closing == "}" else "") + closing * depth
    return (json.dumps(rows[0])[:-1] + f', "extra": {inside}}}').encode(), "refused"


def long_number(source: random.Random, rows: list[Row]) -> Spoiled:
    return (json.dumps(rows[0])[:-1] + ', "extra": ' + "1" * 5_000 + "}").encode(), "refused"


def noise(source: random.Random, rows: list[Row]) -> Spoiled:
    return source.randbytes(source.randint(1, 400)), "refused"


def nothing(source: random.Random, rows: list[Row]) -> Spoiled:
    return source.choice([b"", b"\n", b" \r\n \t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"]), "refused"


def plain(source: random.Random, rows: list[Row]) -> Spoiled:
    return dump(rows, source), "same"


SPOILERS: list[Spoil] = [
    plain, spoil_value(lambda source: source.choice(WRONG)), spoil_value(text), spoil_value(lambda source: None),
    removed, moved, bytes_changed, bytes_lost, truncated, not_utf8, with_line_ends("\r\n"), with_line_ends("\n\n"),
    blank_lines, with_mark, no_last_line_end, recoded, spaced, pretty, as_one_list, two_in_a_line, same_id, same_row,
    same_key, surrogate, foreign_fields, not_a_number, not_quite_json, huge, many_fields, deep, long_number, noise, nothing,
]  # fmt: skip


# --- the independent reader


def lines_of(content: bytes) -> list[Any]:
    """The values of the lines, read without any of the checks, so that checks cannot hide a difference."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [json.loads(line) for line in lines if line.strip()]


def meaning(row: Row) -> tuple[Any, ...]:
    """What a row says: null is missing, tool arguments may be written as a text."""

    def message(given: Row) -> Row:
        said = {key: value for key, value in given.items() if value is not None}
        if not said.pop("tool_calls", None):
            return said
        calls = json.loads(json.dumps(given["tool_calls"]))
        for call in calls:
            function = call.get("function", call)
            arguments = function.get("arguments") or {}
            function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
        return said | {"tool_calls": calls}

    messages = [message(each) for each in row["messages"]]
    return messages, row.get("finish_reason") or "stop", row.get("tools") or None, row.get("template_options") or {}


def check_same(read: list[Conversation], rows: list[Any]) -> None:
    assert len(read) == len(rows)
    assert len({each.id for each in read}) == len(read)
    for conversation, row in zip(read, rows, strict=True):
        messages, *rest = meaning(row)
        # An assistant that only calls tools keeps its content, null.
        found = [{key: value for key, value in each.items() if value is not None} for each in conversation.messages]
        assert found == messages
        assert [conversation.finish_reason, conversation.tools, conversation.template_options] == rest
        assert conversation.id == row["id"] if row.get("id") is not None else conversation.id.startswith("row-")


def spoiled_files() -> list[tuple[str, bytes, str]]:
    source = random.Random(5)
    files = []
    for number in range(FILES):
        spoil = SPOILERS[number % len(SPOILERS)]
        rows = [good_row(source, each) for each in range(source.randint(1, 4))]
        files.append((getattr(spoil, "__qualname__", "?"), *spoil(source, rows)))
    return files


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call returns, or the words of its HeadwayError; no other exception is caught."""
    try:
        return call(), None
    except HeadwayError as error:
        return None, str(error)


def test_conversation_files(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    chat, path, outcomes = FORMATS["Qwen 3, thinking"], tmp_path / "fuzz.jsonl", Counter[tuple[str, bool]]()
    tokenizer = tokenizer_of(chat, tiny_tokenizer)
    learnt = 0
    for name, content, expected in spoiled_files():
        path.write_bytes(content)
        read, refused = attempt(lambda: read_conversations(path))
        outcomes[expected, refused is None] += 1
        if refused is None:
            assert expected != "refused", (name, content[:2000])
            check_same(read, lines_of(content))
            learnt += sum(renders(tokenizer, stops_of(chat, tokenizer), each) for each in read)
        else:
            assert expected != "same", (name, refused, content[:2000])
            assert refused.startswith(f"{path}: "), (name, refused)
            assert len(refused) < len(str(path)) + 400, (name, refused)
    assert min(outcomes["same", True], outcomes["refused", False]) > 200
    assert min(outcomes["either", True], outcomes["either", False]) > 50
    assert learnt > 500


def renders(tokenizer: PreTrainedTokenizerFast, stops: list[int], conversation: Conversation) -> bool:
    """Whether the chat template takes it; every answer is learnt then, in its turn."""
    if sum(len(message.get("content") or "") for message in conversation.messages) > 5_000:
        return False
    sequences, refused = attempt(lambda: render_all(tokenizer, conversation, stops))
    if refused is not None:
        assert refused.startswith(f"conversation '{conversation.id}'")
        return False
    turns = sorted({turn for each in sequences for turn in each.turn} - {0})
    answers = sum(message["role"] == "assistant" for message in conversation.messages)
    cut = conversation.finish_reason == "length"  # an empty answer that was cut has no token
    assert turns == [*range(1, answers + 1)] or (cut and turns == [*range(1, answers)])
    return True


def test_prompt_files(tmp_path: Path) -> None:
    """The same files as prompts: every line is kept with its turns, or counted with a reason."""
    path, kept, left_out = tmp_path / "fuzz.jsonl", 0, 0
    for name, content, expected in spoiled_files():
        path.write_bytes(content)
        tally = Tally()
        prompts, refused = attempt(lambda: list(load_prompts([str(path)], "train", Sieve(), tally)))  # noqa: B023
        if refused is not None:
            assert refused.startswith(f"{path}: "), (name, refused)
            assert expected != "same", (name, refused)
            continue
        lines = content.split(b"\n")
        rows = [line for line in lines if line.strip()]
        if rows and (rows[0].strip()[:1] == b"[" or rows[0].strip() == b"{"):  # one document
            rows = [json.dumps(row).encode() for row in documents(json.loads(content))]
            lines = rows
        assert len(prompts) + tally.left_out.total() == len(rows), (name, str(tally))
        for prompt in prompts:
            row = json.loads(lines[int(prompt.source.rpartition(" ")[2]) - 1].decode("utf-8-sig"))
            said = [(each["role"].lower(), each.get("content") or "") for each in row["messages"]]
            assert [(each["role"], each["content"]) for each in prompt.messages] == said
            json.dumps(prompt.row(), ensure_ascii=False, allow_nan=False).encode()  # it can be written
        kept, left_out = kept + len(prompts), left_out + tally.left_out.total()
        if expected == "same":
            assert len(prompts) == len(rows), (name, tally.faults())
    assert min(kept, left_out) > 200


def documents(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("size", [5_000_000])
def test_a_row_of_megabytes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "huge.jsonl"
    messages = [{"role": "user", "content": "日" * size}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"id": "a", "messages": messages}, ensure_ascii=False), encoding="utf-8")
    assert read_conversations(path) == [Conversation("a", messages)]
