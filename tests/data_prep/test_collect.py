"""Collection: the states of transformers, which conversations are taken, and refusals that leave nothing behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from data_prep import collect as script
from data_prep import target_states
from data_prep.collect import Settings, collect
from data_prep.conversations import read_conversations, render
from data_prep.store import FeatureStore, StoredConversation, read_manifest
from heads.errors import HeadwayError, run_script
from heads.target import Target, TargetEnds
from tests.conftest import make_conversations, save_tiny_target, write_conversations
from tests.data_prep.collecting import Make, refused


def test_states_are_those_of_each_conversation_alone_in_transformers(
    collection: Make, tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, tiny_conversations: Path
) -> None:
    collect(collection(shard_tokens=16384))  # one shard: rows of many lengths are padded together
    store = FeatureStore.open(collection().out)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    by_id = {each.id: each for each in read_conversations(tiny_conversations)}
    assert len(set(store.lengths)) > 10
    assert len(store) == 20
    for row in store:
        rendered = render(tiny_tokenizer, by_id[row.id], (tiny_tokenizer.eos_token_id,))
        assert row.ids_T.tolist() == list(rendered.ids)
        assert row.turn_T.tolist() == list(rendered.turn)
        with torch.no_grad():
            alone = model(row.ids_T[None], output_hidden_states=True)
        torch.testing.assert_close(row.last_TH, alone.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
        for tap in (1, 3):
            torch.testing.assert_close(row.taps[tap], alone.hidden_states[tap][0], rtol=1e-5, atol=1e-5)
        assert_teacher(row, alone.logits[0])


def assert_teacher(row: StoredConversation, logits_TV: torch.Tensor) -> None:
    length = len(row.ids_T)
    served = [at + 1 < length and int(row.turn_T[at + 1]) > 0 for at in range(length)]
    for at in range(length):
        assert int(row.top1_T[at]) == (int(logits_TV[at].argmax()) if served[at] else -1)
        expected = float(torch.log(torch.exp(logits_TV[at].double()).sum())) if served[at] else 0.0
        assert float(row.lse_T[at]) == pytest.approx(expected, abs=1e-4)


def test_top1_and_lse_fit_the_logits_of_the_stored_state(collection: Make, tiny_target_dir: Path) -> None:
    collect(collection(store_dtype="bfloat16", taps=""))
    store = FeatureStore.open(collection().out)
    ends = TargetEnds.load(str(tiny_target_dir), dtype="float32")
    for row in store:
        assert row.last_TH.dtype == torch.bfloat16
        assert row.taps == {}
        assert_teacher(row, ends.logits(row.last_TH.float()))


def test_logits_are_computed_in_bounded_chunks(
    collection: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    collect(collection())
    rows: list[int] = []
    logits = Target.logits

    def counted(self: Target, last: torch.Tensor) -> torch.Tensor:
        rows.append(last.numel() // last.shape[-1])
        return logits(self, last)

    monkeypatch.setattr(Target, "logits", counted)
    monkeypatch.setattr(target_states, "LOGIT_ELEMENTS", 288 * 7)
    collect(collection(out=tmp_path / "chunked"))
    whole, chunked = FeatureStore.open(collection().out), FeatureStore.open(tmp_path / "chunked")
    served = sum(int((row.top1_T >= 0).sum()) for row in whole)
    assert max(rows) == 7  # 288 is the vocabulary
    assert sum(rows) == served == whole.supervised_tokens
    for left, right in zip(whole, chunked, strict=True):
        assert torch.equal(left.top1_T, right.top1_T)
        torch.testing.assert_close(left.lse_T, right.lse_T, rtol=1e-6, atol=1e-6)


def test_manifest_says_what_it_was_made_of(collection: Make, tiny_target_dir: Path, tiny_conversations: Path) -> None:
    collect(collection())
    manifest, store = read_manifest(collection().out), FeatureStore.open(collection().out)
    assert manifest["complete"] is True
    assert manifest["target"]["fingerprint"] == TargetEnds.load(str(tiny_target_dir)).fingerprint
    assert manifest["target"]["dtype"] == "float32"
    assert (manifest["taps"], manifest["tap_convention"]) == ([1, 3], "entering layer i")
    assert (manifest["hidden_size"], manifest["vocab_size"]) == (32, 288)
    assert manifest["conversations"] == tiny_conversations.name
    assert manifest["totals"]["tokens"] == store.tokens
    assert manifest["versions"]["torch"] == torch.__version__


def test_size_is_announced_before_the_pass_and_holds(collection: Make, capsys: pytest.CaptureFixture[str]) -> None:
    collect(collection())
    said = capsys.readouterr().out
    store = FeatureStore.open(collection().out)
    assert f"20 conversations (4 held out), {store.tokens:,} tokens, {store.supervised_tokens:,} supervised" in said
    announced = float(said.split(" MB to write")[0].split()[-1])
    assert announced == pytest.approx(store.tokens * (3 * 32 * 4 + 14) / 1e6, abs=0.06)
    assert said.index("MB to write") < said.index("tokens/s")


def test_max_tokens_takes_a_stable_subset(collection: Make, tmp_path: Path) -> None:
    chosen = []
    for number, most in enumerate((300, 900, None)):
        out = tmp_path / str(number)
        collect(collection(max_tokens=most, out=out))
        store = FeatureStore.open(out)
        chosen.append(set(store.conversation_ids))
        if most:
            assert most <= store.tokens < most + max(store.lengths)
    assert chosen[0] < chosen[1] < chosen[2]
    backwards = write_conversations(tmp_path / "backwards.jsonl", make_conversations(24)[::-1])
    collect(collection(max_tokens=300, out=tmp_path / "again", conversations=backwards))
    assert set(FeatureStore.open(tmp_path / "again").conversation_ids) == chosen[0]


def test_conversations_cut_before_their_first_answer_are_counted(
    collection: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_conversations(4)
    rows[2]["messages"][0]["content"] = "the cat sat on a mat " * 20
    file = write_conversations(tmp_path / "long.jsonl", rows)
    collect(collection(conversations=file, held_out=0, max_length=100))
    said = capsys.readouterr().out
    assert f"1 conversations without a supervised token in 100 tokens left out, first: {rows[2]['id']}" in said
    assert rows[2]["id"] not in FeatureStore.open(collection().out).conversation_ids
    refused(
        collection(max_length=2, out=tmp_path / "none"), "no conversation has a supervised token .* 2 .first: tiny-0"
    )


def test_states_that_are_not_finite_name_the_conversation(
    collection: Make, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Case 15: a target that overflows in float16; bfloat16 is suggested."""
    rows = make_conversations(8)
    rows[3]["messages"][-1]["content"] = "~"
    file = write_conversations(tmp_path / "tilde.jsonl", rows)
    folder = save_tiny_target(tmp_path / "wide", tiny_tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[tiny_tokenizer("~").input_ids] = 1e5  # beyond float16, which ends at 65504
    model.save_pretrained(folder)
    run = collection(conversations=file, held_out=0, target=str(folder))
    with pytest.raises(HeadwayError) as caught:
        collect(Settings(**(vars(run) | {"dtype": "float16"})))
    assert f"conversation {rows[3]['id']}, token" in str(caught.value)
    assert "not finite in float16; collect with --dtype bfloat16 or float32" in str(caught.value)
    collect(Settings(**(vars(run) | {"out": tmp_path / "wide-store"})))
    assert len(FeatureStore.open(tmp_path / "wide-store")) == 8


def test_a_disk_that_is_too_small_is_refused(collection: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14; of every format in test_collect_formats.py."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 500_000})())
    refused(collection(), r"0\.9 MB are to be written and 0\.5 MB are free; free some")


def test_a_conversation_beyond_the_positions_is_refused(collection: Make, tmp_path: Path) -> None:
    rows = make_conversations(2)
    rows[1]["messages"][-1]["content"] = "the cat sat on a mat " * 100
    file = write_conversations(tmp_path / "long.jsonl", rows)
    refused(collection(conversations=file, held_out=0), f"{rows[1]['id']}: .* has 512 positions; give --max_length 512")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conversations": Path("missing.jsonl")}, "missing.jsonl"),
        ({"target": "no/such-folder/there"}, "no/such-folder/there"),
        ({"taps": "2,two"}, "--taps 2,two: give layer numbers"),
        ({"taps": "4"}, "--taps 4: give distinct layers of this target, 0 to 3"),
        ({"taps": "1,1"}, "--taps 1,1: give distinct layers"),
        ({"max_tokens": 0}, "--max_tokens 0: give a positive number"),
        ({"batch_tokens": -1}, "--batch_tokens -1: give a positive number"),
        ({"held_out": -1}, "--held_out -1"),
        ({"held_out": 24}, "24 conversations to hold out of 24"),
    ],
)
def test_bad_settings_are_refused_and_nothing_is_written(
    collection: Make, changes: dict[str, Any], message: str
) -> None:
    refused(collection(**changes), message)
    assert not collection().out.exists()


def test_a_folder_of_something_else_is_refused(collection: Make, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("precious")
    refused(collection(), "store: holds files but no feature store; give --out a new folder")
    refused(collection(out=tmp_path / "store" / "thesis.txt" / "deeper"), "thesis.txt: is a file; give --out a folder")


def test_the_command_line_refuses_an_unknown_key_in_one_line(
    collection: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["collect.py", f"--conversations={collection().conversations}", f"--out={collection().out}"]
    for extra, named in ((["--tapz", "1"], "tapz"), (["--max_length", "many"], "max_length"), ([], "")):
        monkeypatch.setattr(sys, "argv", given[: 1 if not extra else 3] + extra)
        with pytest.raises(SystemExit) as caught:
            run_script(script.main)
        assert caught.value.code == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert said[0].startswith("error: ")
        assert named in said[0]
    assert not collection().out.exists()
