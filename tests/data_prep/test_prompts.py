"""Prompts: which rows are taken, under which ids, what is held out, and nothing that is measured on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from data_prep import prompts as script
from data_prep.conversations import read_conversations
from data_prep.prompts import Settings, Sieve, Tally, load_prompts, normalised, write_prompts
from heads.errors import HeadwayError
from tests.data_prep.foreign_rows import CALLED, TOOL, Row, assistant, put, read, system, texts, user


def test_nothing_is_written_when_nothing_fits(tmp_path: Path) -> None:
    source = put(tmp_path / "s.jsonl", {"title": "a"}, {"messages": []})
    with pytest.raises(
        HeadwayError, match=r"no row can be used; 2 left out: 1 x none of the known fields \(first: .*line 1"
    ):
        write_prompts(Settings([source], tmp_path / "out.jsonl"))
    with pytest.raises(HeadwayError, match="2 conversations to hold out of 1"):
        write_prompts(Settings([put(tmp_path / "s.jsonl", {"text": "a"})], tmp_path / "out.jsonl", held_out=2))
    assert [path.name for path in tmp_path.iterdir()] == ["s.jsonl"]


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


def test_normalised() -> None:
    assert normalised("  What IS\tthis\n?") == normalised("what is this ?") == "what is this ?"
