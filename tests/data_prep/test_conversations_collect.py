"""Conversations that take several sequences, from the file through the store to the split of a training run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep.collect import Settings, collect
from data_prep.conversations import parse_conversation, read_conversations, render_all
from data_prep.plan import describe, plan
from data_prep.store import FeatureStore
from heads.errors import HeadwayError
from tests.conftest import make_conversations, save_tiny_target, write_conversations
from tests.data_prep.chat_formats import FORMATS
from tests.data_prep.mask_oracle import stops_of, tokenizer_of
from train.sampler import split_rows

CHAT = FORMATS["Qwen 3, thinking"]


@pytest.fixture
def target(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer = tokenizer_of(CHAT, tiny_tokenizer)
    folder = save_tiny_target(tmp_path / "target", tokenizer, max_position_embeddings=2048)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops_of(CHAT, tokenizer)}))
    return folder


def thinking(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        for message in row["messages"]:
            if message["role"] == "assistant":
                message["reasoning_content"] = "hm, the cat"
    return rows


def test_every_answer_is_stored_once_and_a_conversation_stays_on_one_side(
    tmp_path: Path, target: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row | {"id": f"set#{number}"} for number, row in enumerate(thinking(make_conversations(12)))]
    file = write_conversations(tmp_path / "some.jsonl", rows)
    collect(Settings(file, tmp_path / "store", str(target), dtype="float32", store_dtype="float32", held_out=0))
    tokenizer = tokenizer_of(CHAT, tiny_tokenizer)
    conversations = read_conversations(file)
    expected = {s.id: s for each in conversations for s in render_all(tokenizer, each, stops_of(CHAT, tokenizer))}
    store = FeatureStore.open(tmp_path / "store")
    assert store.conversation_ids == sorted(expected)
    for row in store:
        assert (row.ids_T.tolist(), row.turn_T.tolist()) == (expected[row.id].ids, expected[row.id].turn)
    answers = {each.id: sum(m["role"] == "assistant" for m in each.messages) for each in conversations}
    assert len(store) == sum(answers.values())
    several = sum(count > 1 for count in answers.values())
    assert several > 5
    assert f"{several} conversations take several sequences" in capsys.readouterr().out

    order = sorted(answers, key=lambda each: hashlib.sha256(each.encode()).hexdigest())
    held = {f"{each}#{n}" if n > 1 else each for each in order[:4] for n in range(1, answers[each] + 1)}
    training, validation = split_rows(store, 4)
    assert {store.conversation_ids[row] for row in validation} == held
    assert {store.conversation_ids[row] for row in training} == set(expected) - held
    with pytest.raises(HeadwayError, match=r"data.held_out is 12, and .* holds 12 conversations"):
        split_rows(store, 12)


def test_two_conversations_under_one_id_are_refused(target: Path) -> None:
    source = describe(str(target), "float32", torch.device("cpu"))
    turns = thinking(make_conversations(9, seed=1))
    first = next(row for row in turns if len(row["messages"]) > 3)
    named = [
        parse_conversation(row, "here")
        for row in ({"id": "a"} | {"messages": first["messages"]}, turns[0] | {"id": "a#2"})
    ]
    with pytest.raises(HeadwayError, match="two conversations are stored under 'a#2'; rename the id of one"):
        plan(named, source, 2048, None, lambda _: None)


def test_the_hash_of_an_entry_covers_tools_and_options(target: Path) -> None:
    source = describe(str(target), "float32", torch.device("cpu"))
    row = thinking(make_conversations(1))[0]
    changes: list[dict[str, Any]] = [{}, {"tools": [{"name": "f"}]}, {"template_options": {"enable_thinking": True}}]
    hashes = [
        plan([parse_conversation(row | change, "here")], source, 2048, None, lambda _: None)[0].entry.sha256
        for change in changes
    ]
    assert len(set(hashes)) == 3
