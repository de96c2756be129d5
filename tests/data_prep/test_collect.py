"""Collection: the states of transformers, the same bytes after a kill, and refusals that leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from data_prep import collect as script
from data_prep import target_states
from data_prep.collect import Settings, collect
from data_prep.conversations import read_conversations, render
from data_prep.plan import share_of_rank
from data_prep.store import FeatureStore, StoredConversation, read_manifest
from heads.errors import HeadwayError, run_script
from heads.target import Target, TargetEnds
from tests.conftest import make_conversations, save_tiny_target, write_conversations

ROOT = Path(__file__).parents[2]
Make = Callable[..., Settings]


@pytest.fixture
def settings(tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path) -> Make:
    """Settings for a store in tmp_path/store out of the tiny conversations; keywords override."""

    def make(**changes: Any) -> Settings:
        usual: dict[str, Any] = {
            "conversations": tiny_conversations,
            "out": tmp_path / "store",
            "target": str(tiny_target_dir),
            "taps": "1,3",
            "dtype": "float32",
            "store_dtype": "float32",
            "held_out": 4,
            "shard_tokens": 400,
        }
        return Settings(**(usual | changes))

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of several threads may be grouped differently; bytes are compared between processes of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if name.startswith("features-")}


def refused(settings: Settings, message: str) -> None:
    """Assert that the collection is refused and leaves the folder as it was."""
    before = contents(settings.out) if settings.out.exists() else None
    with pytest.raises(HeadwayError, match=message):
        collect(settings)
    assert (contents(settings.out) if settings.out.exists() else None) == before


# --- what is stored


def test_states_are_those_of_each_conversation_alone_in_transformers(
    settings: Make, tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, tiny_conversations: Path
) -> None:
    collect(settings(shard_tokens=16384))  # one shard: rows of many lengths are padded together
    store = FeatureStore.open(settings().out)
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


def test_top1_and_lse_fit_the_logits_of_the_stored_state(settings: Make, tiny_target_dir: Path) -> None:
    collect(settings(store_dtype="bfloat16", taps=""))
    store = FeatureStore.open(settings().out)
    ends = TargetEnds.load(str(tiny_target_dir), dtype="float32")
    for row in store:
        assert row.last_TH.dtype == torch.bfloat16
        assert row.taps == {}
        assert_teacher(row, ends.logits(row.last_TH.float()))


def test_logits_are_computed_in_bounded_chunks(settings: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collect(settings())
    rows: list[int] = []
    logits = Target.logits

    def counted(self: Target, last: torch.Tensor) -> torch.Tensor:
        rows.append(last.numel() // last.shape[-1])
        return logits(self, last)

    monkeypatch.setattr(Target, "logits", counted)
    monkeypatch.setattr(target_states, "LOGIT_ELEMENTS", 288 * 7)
    collect(settings(out=tmp_path / "chunked"))
    whole, chunked = FeatureStore.open(settings().out), FeatureStore.open(tmp_path / "chunked")
    served = sum(int((row.top1_T >= 0).sum()) for row in whole)
    assert max(rows) == 7  # 288 is the vocabulary
    assert sum(rows) == served == whole.supervised_tokens
    for left, right in zip(whole, chunked, strict=True):
        assert torch.equal(left.top1_T, right.top1_T)
        torch.testing.assert_close(left.lse_T, right.lse_T, rtol=1e-6, atol=1e-6)


def test_manifest_says_what_it_was_made_of(settings: Make, tiny_target_dir: Path, tiny_conversations: Path) -> None:
    collect(settings())
    manifest, store = read_manifest(settings().out), FeatureStore.open(settings().out)
    assert manifest["complete"] is True
    assert manifest["target"]["fingerprint"] == TargetEnds.load(str(tiny_target_dir)).fingerprint
    assert manifest["target"]["dtype"] == "float32"
    assert (manifest["taps"], manifest["tap_convention"]) == ([1, 3], "entering layer i")
    assert (manifest["hidden_size"], manifest["vocab_size"]) == (32, 288)
    assert manifest["conversations"] == tiny_conversations.name
    assert manifest["totals"]["tokens"] == store.tokens
    assert manifest["versions"]["torch"] == torch.__version__


def test_size_is_announced_before_the_pass_and_holds(settings: Make, capsys: pytest.CaptureFixture[str]) -> None:
    collect(settings())
    said = capsys.readouterr().out
    store = FeatureStore.open(settings().out)
    assert f"20 conversations (4 held out), {store.tokens:,} tokens, {store.supervised_tokens:,} supervised" in said
    announced = float(said.split(" MB to write")[0].split()[-1])
    assert announced == pytest.approx(store.tokens * (3 * 32 * 4 + 14) / 1e6, abs=0.06)
    assert said.index("MB to write") < said.index("tokens/s")


# --- resuming


def launch(settings: Settings, *, ranks: int = 1) -> subprocess.Popen[bytes]:
    command = [sys.executable]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command += ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines", "1"]
        command += ["--num_processes", str(ranks), "--main_process_port", str(port), "--mixed_precision", "no"]
    command += [str(ROOT / "data_prep" / "collect.py")]
    command += [
        f"--{name}={value}" for name, value in vars(settings).items() if value is not None and value is not False
    ]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths})


def test_killed_and_started_again_writes_the_same_bytes(
    settings: Make, tmp_path: Path, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    many = write_conversations(tmp_path / "many.jsonl", make_conversations(150, seed=1))
    killed = settings(conversations=many, shard_tokens=300)
    process = launch(killed)
    try:
        while len(list(killed.out.glob("features-*.json"))) < 2:
            assert process.poll() is None, "ended before it could be killed"
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    at_kill = shards(killed.out)
    (killed.out / ".features-00000-of-00001-00077.safetensors.1.tmp").write_bytes(b"half")
    (killed.out / "features-00000-of-00001-00078.safetensors").write_bytes(b"no sidecar yet")
    with pytest.raises(HeadwayError, match="did not finish"):
        FeatureStore.open(killed.out)
    collect(killed)
    said = capsys.readouterr().out
    assert "removed .features-00000-of-00001-00077.safetensors.1.tmp, half written" in said
    assert "removed features-00000-of-00001-00078.safetensors, half written" in said
    whole = settings(conversations=many, shard_tokens=300, out=tmp_path / "whole")
    collect(whole)
    assert contents(killed.out) == contents(whole.out)
    assert 4 <= len(at_kill) < len(shards(whole.out))
    whole_sidecars = {name: content for name, content in at_kill.items() if name.endswith(".json")}
    assert whole_sidecars.items() <= shards(whole.out).items()


def test_two_processes_store_the_same_conversations(settings: Make, tmp_path: Path) -> None:
    collect(settings())
    two = settings(out=tmp_path / "two")
    assert launch(two, ranks=2).wait() == 0
    assert {name[:23] for name in shards(two.out)} == {"features-00000-of-00002", "features-00001-of-00002"}
    alone, both = FeatureStore.open(settings().out), FeatureStore.open(two.out)
    assert both.manifest["arguments"]["processes"] == 2
    assert both.conversation_ids == alone.conversation_ids
    assert torch.equal(both.supervised_counts(), alone.supervised_counts())
    for left, right in zip(alone, both, strict=True):
        assert torch.equal(left.ids_T, right.ids_T)
        assert torch.equal(left.turn_T, right.turn_T)
        assert torch.equal(left.top1_T, right.top1_T)
        torch.testing.assert_close(left.last_TH, right.last_TH, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(left.taps[3], right.taps[3], rtol=1e-5, atol=1e-5)


def test_ranks_share_the_conversations_without_overlap(settings: Make, tiny_conversations: Path) -> None:
    source = script.describe(settings().target, "float32", torch.device("cpu"))
    planned = script.plan(read_conversations(tiny_conversations), source, 2048, None, lambda _: None)
    shares = [share_of_rank(planned, rank, 3) for rank in range(3)]
    assert sorted(row.entry.id for share in shares for row in share) == sorted(row.entry.id for row in planned)
    assert all(shares)
    for share in shares:
        assert [row.entry.length for row in share] == sorted(row.entry.length for row in share)


def test_a_complete_store_is_left_alone_and_no_weights_are_loaded(
    settings: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collect(settings())
    before = contents(settings().out)

    def load(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Target, "load", load)
    collect(settings())
    assert "complete, nothing to do" in capsys.readouterr().out
    assert contents(settings().out) == before
    # Killed after the last shard, before the manifest: completed without weights, too.
    manifest = json.loads((settings().out / "manifest.json").read_text())
    unfinished = {key: value for key, value in manifest.items() if key not in ("shards", "totals", "manifest_sha256")}
    script.write_manifest(settings().out, unfinished | {"complete": False})
    collect(settings())
    assert contents(settings().out) == before


def test_added_conversations_are_collected_and_finished_shards_stay(settings: Make, tmp_path: Path) -> None:
    rows = make_conversations(12)
    file = write_conversations(tmp_path / "grows.jsonl", rows[:8])
    collect(settings(conversations=file, held_out=0))
    before = shards(settings().out)
    write_conversations(file, rows)
    collect(settings(conversations=file, held_out=0))
    assert before.items() < shards(settings().out).items()
    assert FeatureStore.open(settings().out).conversation_ids == sorted(row["id"] for row in rows)


def test_resume_names_the_conversation_that_is_gone_or_changed(settings: Make, tmp_path: Path) -> None:
    rows = make_conversations(8)
    file = write_conversations(tmp_path / "changes.jsonl", rows)
    collect(settings(conversations=file, held_out=0))
    write_conversations(file, rows[1:])
    refused(settings(conversations=file, held_out=0), f"conversation {rows[0]['id']}, which this run does not take")
    changed = json.loads(json.dumps(rows))
    changed[5]["messages"][-1]["content"] += " more"
    write_conversations(file, changed)
    refused(settings(conversations=file, held_out=0), f"conversation {rows[5]['id']} has changed .* delete the folder")


def test_resume_with_other_settings_names_both_values(
    settings: Make, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    collect(settings())
    refused(settings(max_length=40), "max_length 2048, this run has 40; give a new --out or delete the folder")
    refused(settings(taps="1"), r"taps \[1, 3\], this run has \[1\]")
    refused(settings(store_dtype="bfloat16"), "dtype float32, this run has bfloat16")
    refused(settings(dtype="bfloat16"), "target.dtype float32, this run has bfloat16")
    other = save_tiny_target(tmp_path / "other", tiny_tokenizer, seed=1)
    refused(settings(target=str(other)), "target.fingerprint [0-9a-f]{64}, this run has [0-9a-f]{64}")


def test_a_moved_target_is_the_same_target(settings: Make, tiny_target_dir: Path, tmp_path: Path) -> None:
    collect(settings())
    moved = shutil.copytree(tiny_target_dir, tmp_path / "moved")
    collect(settings(target=str(moved)))


def test_resume_refuses_a_damaged_shard_and_recovers_when_it_is_deleted(settings: Make) -> None:
    collect(settings())
    before = contents(settings().out)
    name = "features-00000-of-00001-00001"
    path = settings().out / f"{name}.safetensors"
    path.write_bytes(before[path.name][:-1] + b"x")
    refused(settings(), rf"{name}.safetensors: checksum differs .* delete {name}.safetensors and {name}.json")
    path.unlink()
    path.with_suffix(".json").unlink()
    collect(settings())
    assert contents(settings().out) == before


# --- what is chosen


def test_max_tokens_takes_a_stable_subset(settings: Make, tmp_path: Path) -> None:
    chosen = []
    for number, most in enumerate((300, 900, None)):
        out = tmp_path / str(number)
        collect(settings(max_tokens=most, out=out))
        store = FeatureStore.open(out)
        chosen.append(set(store.conversation_ids))
        if most:
            assert most <= store.tokens < most + max(store.lengths)
    assert chosen[0] < chosen[1] < chosen[2]
    backwards = write_conversations(tmp_path / "backwards.jsonl", make_conversations(24)[::-1])
    collect(settings(max_tokens=300, out=tmp_path / "again", conversations=backwards))
    assert set(FeatureStore.open(tmp_path / "again").conversation_ids) == chosen[0]


def test_conversations_cut_before_their_first_answer_are_counted(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_conversations(4)
    rows[2]["messages"][0]["content"] = "the cat sat on a mat " * 20
    file = write_conversations(tmp_path / "long.jsonl", rows)
    collect(settings(conversations=file, held_out=0, max_length=100))
    said = capsys.readouterr().out
    assert f"1 conversations without a supervised token in 100 tokens left out, first: {rows[2]['id']}" in said
    assert rows[2]["id"] not in FeatureStore.open(settings().out).conversation_ids
    refused(settings(max_length=2, out=tmp_path / "none"), "no conversation has a supervised token .* 2 .first: tiny-0")


# --- what is refused


def test_states_that_are_not_finite_name_the_conversation(
    settings: Make, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = make_conversations(8)
    rows[3]["messages"][-1]["content"] = "~"
    file = write_conversations(tmp_path / "tilde.jsonl", rows)
    folder = save_tiny_target(tmp_path / "wide", tiny_tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[tiny_tokenizer("~").input_ids] = 1e5  # beyond float16, which ends at 65504
    model.save_pretrained(folder)
    run = settings(conversations=file, held_out=0, target=str(folder))
    with pytest.raises(HeadwayError) as caught:
        collect(Settings(**(vars(run) | {"dtype": "float16"})))
    assert f"conversation {rows[3]['id']}, token" in str(caught.value)
    assert "not finite in float16; collect with --dtype bfloat16 or float32" in str(caught.value)
    collect(Settings(**(vars(run) | {"out": tmp_path / "wide-store"})))
    assert len(FeatureStore.open(tmp_path / "wide-store")) == 8


def test_a_disk_that_is_too_small_is_refused(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 500_000})())
    refused(settings(), r"0\.9 MB are to be written and 0\.5 MB are free; free some")


def test_a_conversation_beyond_the_positions_is_refused(settings: Make, tmp_path: Path) -> None:
    rows = make_conversations(2)
    rows[1]["messages"][-1]["content"] = "the cat sat on a mat " * 100
    file = write_conversations(tmp_path / "long.jsonl", rows)
    refused(settings(conversations=file, held_out=0), f"{rows[1]['id']}: .* has 512 positions; give --max_length 512")


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
def test_bad_settings_are_refused_and_nothing_is_written(settings: Make, changes: dict[str, Any], message: str) -> None:
    refused(settings(**changes), message)
    assert not settings().out.exists()


def test_a_folder_of_something_else_is_refused(settings: Make, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("precious")
    refused(settings(), "store: holds files but no feature store; give --out a new folder")
    refused(settings(out=tmp_path / "store" / "thesis.txt" / "deeper"), "thesis.txt: is a file; give --out a folder")


def test_the_command_line_refuses_an_unknown_key_in_one_line(
    settings: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["collect.py", f"--conversations={settings().conversations}", f"--out={settings().out}"]
    for extra, named in ((["--tapz", "1"], "tapz"), (["--max_length", "many"], "max_length"), ([], "")):
        monkeypatch.setattr(sys, "argv", given[: 1 if not extra else 3] + extra)
        with pytest.raises(SystemExit) as caught:
            run_script(script.main)
        assert caught.value.code == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert said[0].startswith("error: ")
        assert named in said[0]
    assert not settings().out.exists()


def test_accelerate_that_starts_one_process_in_place_of_several_is_refused(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    refused(settings(), "starts one process whatever --num_processes says; give --multi_gpu")
