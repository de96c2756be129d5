"""Seeds of invented user turns: which one when, what the target is shown, and what stays in the conversations."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep.conversations import read_conversations
from data_prep.seeds import Seed, Seeds
from data_prep.synthesize import Author, Settings, main, synthesize
from heads.errors import HeadwayError
from heads.target import Target

BOATS = "You are an expert on boats, and help people with their questions about boats."
TREES = "You are an expert on trees, and help people with their questions about trees."


def test_all_pairs_of_topics_and_openings_come_in_turn(tmp_path: Path) -> None:
    (tmp_path / "openings").write_text("\ufeffHow\n\n Why \n", encoding="utf-8")
    seeds = Seeds(topics="boats; trees;", openings=str(tmp_path / "openings"))
    expected = [Seed(BOATS, "How"), Seed(TREES, "How"), Seed(BOATS, "Why"), Seed(TREES, "Why")]
    assert [seeds[number] for number in range(12)] == expected * 3
    assert Seeds()[5] == Seed()
    assert Seeds()[0].turn() == []
    spoken = "The user writes in German, and you answer in German."
    assert Seeds("Be kind.", "boats", "German")[1] == Seed(f"Be kind. {BOATS} {spoken}")
    assert len(Seeds(topics=";".join("ab" * 500 for _ in range(20))).topics) == 20  # no file name is so long


@pytest.mark.parametrize("given", [" ", ";;", "file"])
def test_seeds_that_hold_nothing(tmp_path: Path, given: str) -> None:
    (tmp_path / "file").write_text("\n \n")
    given = str(tmp_path / "file") if given == "file" else given
    with pytest.raises(HeadwayError, match=r"--topics .*: holds nothing"):
        Seeds(topics=given)
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(HeadwayError, match=r"--openings .*: is not UTF-8"):
        Seeds(openings=str(tmp_path / "file"))


@pytest.fixture
def shown(tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tiny target says words and stops; the list collects the texts that it was to go on with."""
    loaded = Target.load(str(tiny_target_dir), "float32")
    words = [index for token, index in tiny_tokenizer.get_vocab().items() if token[0] == "Ġ" and len(token) > 1]
    bias_V = torch.full((len(tiny_tokenizer),), -1e4)
    bias_V[words], bias_V[tiny_tokenizer.eos_token_id] = 0.0, 0.5
    logits, write = Target.logits, Author.write_all
    texts: list[str] = []

    def noted(self: Author, asked: list[Any], *choose: Any) -> list[list[int]]:
        texts.extend(tiny_tokenizer.decode(text.prompt) for text in asked)
        return write(self, asked, *choose)

    monkeypatch.setattr(Target, "load", lambda *_: loaded)
    monkeypatch.setattr(Target, "logits", lambda self, last: logits(self, last) + bias_V)
    monkeypatch.setattr(Author, "write_all", noted)
    return texts


def run(tmp_path: Path, **changes: Any) -> list[list[dict[str, str]]]:
    usual: dict[str, Any] = {"count": 8, "two_turns": 8, "batch_size": 4, "dtype": "float32"}
    usual |= {"max_user_tokens": 24, "max_answer_tokens": 12, "out": tmp_path / "out.jsonl"}
    synthesize(Settings(**(usual | changes)))
    return [row.messages for row in read_conversations(tmp_path / "out.jsonl")]


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.mark.parametrize("keep", [False, True])
def test_what_the_target_is_shown_and_what_stays(shown: list[str], tmp_path: Path, keep: bool) -> None:
    rows = run(tmp_path, topics="boats;trees", openings="the cat;Now", keep_system=keep)
    steered = [turn("system", system) for system in (BOATS, TREES)]
    inventing = [text for text in shown if text.endswith(("user\nthe cat", "user\nNow"))]
    pairs = itertools.cycle([(0, "the cat"), (1, "the cat"), (0, "Now"), (1, "Now")])
    assert inventing == [
        f"{steered[topic]}<|im_start|>user\n{opening}" for _, (topic, opening) in zip(inventing, pairs, strict=False)
    ]
    assert len(rows) >= 4
    twice = 0
    for messages in rows:
        assert [message["role"] for message in messages[:1]] == (["system"] if keep else ["user"])
        told = messages.pop(0)["content"] if keep else None
        assert told in ((BOATS, TREES) if keep else (None,))
        assert messages[0]["content"].startswith(("the cat", "Now"))
        answered = "".join(turn(message["role"], message["content"]) for message in messages[:-1])
        kept = turn("system", told) if told else ""
        assert f"{kept}{answered}<|im_start|>assistant\n" in shown
        if len(messages) == 4:
            twice += 1
            history = "".join(turn(message["role"], message["content"]) for message in messages[:2])
            assert any(f"{system}{history}<|im_start|>user\n" in shown for system in ([kept] if keep else steered))
    assert twice


def test_without_seeds_nothing_is_put_before(shown: list[str], tmp_path: Path) -> None:
    run(tmp_path)
    assert shown[:4] == ["<|im_start|>user\n"] * 4
    assert not any("system" in text for text in shown)


def test_other_topics_in_the_same_file_are_other_settings(
    shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "topics").write_text("boats\n")
    monkeypatch.setattr(Path, "unlink", lambda self, **_: None)  # as if killed before the end
    run(tmp_path, topics=str(tmp_path / "topics"))
    (tmp_path / "topics").write_text("trees\n")
    with pytest.raises(HeadwayError, match="begun with other settings"):
        run(tmp_path, topics=str(tmp_path / "topics"))


def test_a_template_without_system_turns(shown: list[str], tmp_path: Path) -> None:
    tokenizer = Target.load().tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + before
    )
    with pytest.raises(HeadwayError, match=r"refuses a system turn \(no system turns\); leave out --system, --topics"):
        run(tmp_path, topics="boats")
    tokenizer.chat_template = before


def test_the_command_line(shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    command = f"synthesize.py --out {out} --count 4 --two_turns 0 --batch_size 4 --max_answer_tokens 12 --dtype float32"
    monkeypatch.setattr("sys.argv", [*command.split(), "--topics", "boats;trees", "--keep_system"])
    main()
    assert {row.messages[0]["content"] for row in read_conversations(out)} <= {BOATS, TREES}
