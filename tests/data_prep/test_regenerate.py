"""Regeneration: the target's own words on every prompt, by a server and in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep.conversations import parse_conversation, read_conversations, render_all
from data_prep.journal import Journal
from data_prep.regenerate import Settings, regenerate
from data_prep.render import prompt_ids
from heads.errors import HeadwayError
from heads.target import Target
from tests.conftest import write_conversations
from tests.data_prep.regenerating import Make, Serve, as_expected, make_prompts, rows_of, work_of


def test_every_turn_is_answered_in_order(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve(delay=0.05)  # so that some are asked at once
    totals = regenerate(regeneration(server=server.url))
    prompts = make_prompts(24)
    assert as_expected(regeneration(), tiny_tokenizer, prompts)
    assert not work_of(regeneration()).exists()
    turns = sum(message["role"] == "user" for row in prompts for message in row["messages"])
    assert totals is not None
    assert (totals.conversations, totals.answers, totals.cut) == (24, turns, 0)
    assert set(server.answered.values()) == {1}
    assert len(server.bodies) == turns
    assert 1 < server.most_at_once <= 8
    for row, conversation in zip(rows_of(regeneration().out), read_conversations(regeneration().out), strict=True):
        assert row["made_by"]["temperature"] == 0
        (sequence,) = render_all(tiny_tokenizer, conversation, [tiny_tokenizer.eos_token_id])
        for turn, ids in enumerate(row["token_ids"], 1):
            assert [token for token, at in zip(sequence.ids, sequence.turn, strict=True) if at == turn] == ids
    assert sum(len(ids) for row in rows_of(regeneration().out) for ids in row["token_ids"]) == totals.tokens


def test_cut_answers_end_their_conversations(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve()
    totals = regenerate(regeneration(server=server.url, max_new_tokens=5))
    assert as_expected(regeneration(max_new_tokens=5), tiny_tokenizer, make_prompts(24))
    rows = rows_of(regeneration().out)
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert totals is not None
    assert 5 < len(cut) == totals.cut < 24
    for row in rows:
        assert [len(ids) == 5 and ids[-1] != tiny_tokenizer.eos_token_id for ids in row["token_ids"]] == [
            row in cut and turn == len(row["token_ids"]) for turn in range(1, len(row["token_ids"]) + 1)
        ]


def test_nothing_is_written_by_a_plan(regeneration: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert regenerate(regeneration(server="http://127.0.0.1:9/v1", dry_run=True)) is None
    said = capsys.readouterr().out
    prompts = read_prompt_tokens(regeneration())
    assert f"24 conversations, 0 answers there, 48 to be written (greedy, http://127.0.0.1:9/v1): {prompts:,}" in said
    assert "at most 3,072 tokens" in said
    assert sorted(path.name for path in regeneration().out.parent.iterdir()) == ["prompts.jsonl"]


def read_prompt_tokens(settings: Settings) -> int:
    """Tokens of the prompts up to their first answers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.target)
    firsts = []
    for row in make_prompts(24):
        roles = [message["role"] for message in row["messages"]]
        firsts.append(row["messages"][: roles.index("user") + 1])
    return sum(len(prompt_ids(tokenizer, messages)) for messages in firsts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_new_tokens": 0}, "--max_new_tokens 0"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"batch_size": -1}, "--batch_size -1"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top_p"),
        ({"top_p": 0.9}, "--top_p 0.9: is for sampled answers"),
        ({"timeout": 0.0}, "--timeout"),
    ],
)
def test_bad_settings(regeneration: Make, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        regeneration(**changes)


def argmax_answers(target: Target, row: dict[str, Any]) -> bool:
    """Whether every token of a row's answers is the target's best one behind all before it."""
    (sequence,) = render_all(target.tokenizer, parse_conversation(row, "row"), target.eos_ids)
    best_T = target.logits(target.states(torch.tensor([sequence.ids])).last)[0].argmax(-1).tolist()
    return all(best_T[t - 1] == token for t, token in enumerate(sequence.ids) if sequence.turn[t])


def test_in_this_process(regeneration: Make, talks: Target) -> None:
    totals = regenerate(regeneration(batch_size=7, max_new_tokens=12))
    assert totals is not None
    rows = rows_of(regeneration().out)
    prompts = {row["id"]: row for row in make_prompts(24)}
    assert [row["id"] for row in rows] == [identity for identity in prompts if identity in {row["id"] for row in rows}]
    assert len(rows) + sum(totals.left_out.values()) == 24
    assert set(totals.left_out) <= {"the answer is blank"}  # the stop token came first
    assert all(argmax_answers(talks, row) for row in rows)
    assert totals.answers > 24
    assert 0 < totals.cut < 20
    for row in rows:
        users = [message["content"] for message in prompts[row["id"]]["messages"] if message["role"] == "user"]
        asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert asked == users[: len(asked)]
        assert row["messages"][-1]["role"] == "assistant"
        assert row["made_by"]["by"] == "transformers, float32"


def test_in_this_process_killed_and_sampled(regeneration: Make, talks: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    given = regeneration(batch_size=5, max_new_tokens=12, temperature=1.0, top_p=0.9)
    regenerate(given)
    whole = given.out.read_bytes()
    given.out.unlink()
    append, appended = Journal.append, []

    def stop(self: Journal, entry: dict[str, Any]) -> None:
        if len(appended) == 17:
            raise KeyboardInterrupt
        appended.append(entry)
        append(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            regenerate(given)
    rows = make_prompts(24)[::-1]
    write_conversations(given.prompts, rows)
    regenerate(given)
    assert given.out.read_bytes().splitlines() == whole.splitlines()[::-1]
    given.out.unlink()
    regenerate(regeneration(batch_size=5, max_new_tokens=12, temperature=1.0, top_p=0.9, seed=1))
    assert given.out.read_bytes().splitlines() != whole.splitlines()[::-1]
