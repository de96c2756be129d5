"""Files, folders and names: one meaning in every kind, rows left out counted, broken ones refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data_prep.prompts import Settings, write_prompts
from data_prep.sources import rows_of
from heads.errors import HeadwayError
from tests.data_prep.foreign_rows import LOGGED, TALK, TOOL, Row, assistant, call, put, read, system, texts, user


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
