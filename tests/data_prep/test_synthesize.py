"""Synthesis on a tiny target: greedy answers as generate gives them, the same bytes whatever the interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep import synthesize as script
from data_prep.conversations import read_conversations
from data_prep.synthesize import (
    Author,
    Settings,
    Work,
    conversation_id,
    normalised,
    synthesize,
)
from heads.errors import HeadwayError
from heads.target import Target

Make = Callable[..., Settings]
STOP_BIAS = 0.5


@pytest.fixture
def target(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The tiny target, loaded once a test."""
    loaded = Target.load(str(tiny_target_dir), "float32")
    monkeypatch.setattr(Target, "load", lambda *_: loaded)
    return loaded


@pytest.fixture
def talks(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Let the tiny target say nothing but words that begin with a blank (their text gives their tokens back), and stop."""
    words = [index for token, index in tiny_tokenizer.get_vocab().items() if token[0] == "Ġ" and len(token) > 1]
    bias_V = torch.full((len(tiny_tokenizer),), -1e4)
    bias_V[words] = 0.0
    bias_V[tiny_tokenizer.eos_token_id] = STOP_BIAS
    logits = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, last: logits(self, last) + bias_V)


@pytest.fixture
def settings(target: Target, talks: None, tmp_path: Path) -> Make:
    """Settings of a run in a second or less; keywords override."""

    def make(**changes: Any) -> Settings:
        usual: dict[str, Any] = {
            "target": "the tiny one",
            "out": tmp_path / "out.jsonl",
            "count": 12,
            "two_turns": 4,
            "batch_size": 5,
            "max_user_tokens": 24,
            "max_answer_tokens": 12,
            "dtype": "float32",
        }
        return Settings(**(usual | changes))

    return make


def test_files_are_good_conversations(settings: Make, target: Target) -> None:
    synthesize(settings())
    rows = read_conversations(settings().out)
    assert 8 <= len(rows) <= 12
    assert [row.id for row in rows] == sorted({conversation_id(row.messages[0]["content"]) for row in rows})
    assert any(len(row.messages) == 4 for row in rows)
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    for row in rows:
        assert [message["role"] for message in row.messages] == ["user", "assistant"] * (len(row.messages) // 2)
        lengths = [
            len(target.tokenizer(m["content"], add_special_tokens=False)["input_ids"]) for m in row.messages[1::2]
        ]
        assert (lengths[-1] == 12) == (row.finish_reason == "length")  # 11 and the stop token, or 12 and none
        assert all(length < 12 for length in lengths[:-1])
    assert not settings().out.with_name("out.jsonl.work").exists()


def test_same_bytes_after_every_interruption(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    out = settings().out
    work = out.with_name("out.jsonl.work")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda self: None)
        synthesize(settings())
    expected, lines = out.read_bytes(), work.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 8
    computed: list[str] = []
    run = Work.run

    def counted(self: Work, batch: str, compute: Callable[[], list[Any]]) -> list[Any]:
        return run(self, batch, lambda: [computed.append(batch), *compute()][1:])  # type: ignore[func-returns-value]

    monkeypatch.setattr(Work, "run", counted)
    for kept in (0, 1, 2, len(lines) // 2, len(lines) - 1, len(lines)):
        torn = lines[kept][: len(lines[kept]) // 2] if kept < len(lines) else b""
        computed.clear()
        out.unlink()
        work.write_bytes(b"".join(lines[:kept]) + torn)
        synthesize(settings())
        assert out.read_bytes() == expected
        assert len(computed) == min(len(lines) - kept, len(lines) - 1)  # the first line holds the settings
    synthesize(settings(seed=1))
    assert out.read_bytes() != expected


def test_other_settings_are_refused(settings: Make) -> None:
    work = settings().out.with_name("out.jsonl.work")
    Work(work, {"seed": "0"})
    with pytest.raises(HeadwayError, match=r"out\.jsonl\.work: line 1: was begun with other settings"):
        synthesize(settings())
    assert not settings().out.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"count": 0}, "--count 0"),
        ({"batch_size": -1}, "--batch_size -1"),
        ({"two_turns": -1}, "--two_turns"),
        ({"top_p": 0.0}, "--top_p"),
        ({"temperature": 0.0}, "--temperature"),
    ],
)
def test_bad_settings(settings: Make, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        settings(**changes)


def test_a_target_that_cannot_end_is_refused(settings: Make) -> None:
    with pytest.raises(HeadwayError, match="20 batches gave no new user turn after"):
        synthesize(settings(max_user_tokens=1))


def test_sane_text(target: Target) -> None:
    writer = Author(target, 4)
    stop = writer.target.eos_ids[0]

    def ids(text: str) -> list[int]:
        return writer.tokenizer(text, add_special_tokens=False)["input_ids"]

    assert writer.sane_text([*ids(" the cat\nsat 日本 "), stop]) == "the cat\nsat 日本"
    assert writer.sane_text(ids("the cat sat")) is None  # cut
    for bad in ("", "  \n", "12 ?!", "the <|im_start|> cat", "the cat\u0000", "the cat\u200b", "the cat\x1b[0m"):
        assert writer.sane_text([*ids(bad), stop]) is None, bad
    assert writer.sane_text([*ids("the cat 日")[:-1], stop]) is None  # half a character


def test_ids_follow_the_normalised_text() -> None:
    assert normalised("  What IS\tthis\n?") == normalised("what is this ?") == "what is this ?"
    assert conversation_id("What is\u00a0this?") == conversation_id("what IS this?") != conversation_id("what is that?")
    assert json.dumps(conversation_id("a")).count("-") == 1
    assert len(conversation_id("a")) == 16


def test_no_arguments_are_parsed_at_import() -> None:
    assert script.Settings().target == "smollm2-135m-instruct"
