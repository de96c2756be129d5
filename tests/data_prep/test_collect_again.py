"""Collection killed and started again, in several processes, and over a store that is there: the same bytes, or a refusal."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep import collect as script
from data_prep.collect import collect
from data_prep.conversations import read_conversations
from data_prep.plan import share_of_rank
from data_prep.store import FeatureStore
from heads.errors import HeadwayError
from heads.target import Target
from tests.conftest import make_conversations, save_tiny_target, write_conversations
from tests.data_prep.collecting import Make, contents, launch, refused, shards


def test_killed_and_started_again_writes_the_same_bytes(
    collection: Make, tmp_path: Path, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    many = write_conversations(tmp_path / "many.jsonl", make_conversations(150, seed=1))
    killed = collection(conversations=many, shard_tokens=300)
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
    whole = collection(conversations=many, shard_tokens=300, out=tmp_path / "whole")
    collect(whole)
    assert contents(killed.out) == contents(whole.out)
    assert 4 <= len(at_kill) < len(shards(whole.out))
    whole_sidecars = {name: content for name, content in at_kill.items() if name.endswith(".json")}
    assert whole_sidecars.items() <= shards(whole.out).items()


def test_two_processes_store_the_same_conversations(collection: Make, tmp_path: Path) -> None:
    collect(collection())
    two = collection(out=tmp_path / "two")
    assert launch(two, ranks=2).wait() == 0
    assert {name[:23] for name in shards(two.out)} == {"features-00000-of-00002", "features-00001-of-00002"}
    alone, both = FeatureStore.open(collection().out), FeatureStore.open(two.out)
    assert both.manifest["arguments"]["processes"] == 2
    assert both.conversation_ids == alone.conversation_ids
    assert torch.equal(both.supervised_counts(), alone.supervised_counts())
    for left, right in zip(alone, both, strict=True):
        assert torch.equal(left.ids_T, right.ids_T)
        assert torch.equal(left.turn_T, right.turn_T)
        assert torch.equal(left.top1_T, right.top1_T)
        torch.testing.assert_close(left.last_TH, right.last_TH, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(left.taps[3], right.taps[3], rtol=1e-5, atol=1e-5)


def test_ranks_share_the_conversations_without_overlap(collection: Make, tiny_conversations: Path) -> None:
    source = script.describe(collection().target, "float32", torch.device("cpu"))
    planned = script.plan(read_conversations(tiny_conversations), source, 2048, None, lambda _: None)
    shares = [share_of_rank(planned, rank, 3) for rank in range(3)]
    assert sorted(row.entry.id for share in shares for row in share) == sorted(row.entry.id for row in planned)
    assert all(shares)
    for share in shares:
        assert [row.entry.length for row in share] == sorted(row.entry.length for row in share)


def test_a_complete_store_is_left_alone_and_no_weights_are_loaded(
    collection: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collect(collection())
    before = contents(collection().out)

    def load(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Target, "load", load)
    collect(collection())
    assert "complete, nothing to do" in capsys.readouterr().out
    assert contents(collection().out) == before
    # Killed after the last shard, before the manifest: completed without weights, too.
    manifest = json.loads((collection().out / "manifest.json").read_text())
    unfinished = {key: value for key, value in manifest.items() if key not in ("shards", "totals", "manifest_sha256")}
    script.write_manifest(collection().out, unfinished | {"complete": False})
    collect(collection())
    assert contents(collection().out) == before


def test_added_conversations_are_collected_and_finished_shards_stay(collection: Make, tmp_path: Path) -> None:
    rows = make_conversations(12)
    file = write_conversations(tmp_path / "grows.jsonl", rows[:8])
    collect(collection(conversations=file, held_out=0))
    before = shards(collection().out)
    write_conversations(file, rows)
    collect(collection(conversations=file, held_out=0))
    assert before.items() < shards(collection().out).items()
    assert FeatureStore.open(collection().out).conversation_ids == sorted(row["id"] for row in rows)


def test_resume_names_the_conversation_that_is_gone_or_changed(collection: Make, tmp_path: Path) -> None:
    rows = make_conversations(8)
    file = write_conversations(tmp_path / "changes.jsonl", rows)
    collect(collection(conversations=file, held_out=0))
    write_conversations(file, rows[1:])
    refused(collection(conversations=file, held_out=0), f"conversation {rows[0]['id']}, which this run does not take")
    changed = json.loads(json.dumps(rows))
    changed[5]["messages"][-1]["content"] += " more"
    write_conversations(file, changed)
    refused(
        collection(conversations=file, held_out=0), f"conversation {rows[5]['id']} has changed .* delete the folder"
    )


def test_resume_with_other_settings_names_both_values(
    collection: Make, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    collect(collection())
    refused(collection(max_length=40), "max_length 2048, this run has 40; give a new --out or delete the folder")
    refused(collection(taps="1"), r"taps \[1, 3\], this run has \[1\]")
    refused(collection(store_dtype="bfloat16"), "dtype float32, this run has bfloat16")
    refused(collection(dtype="bfloat16"), "target.dtype float32, this run has bfloat16")
    other = save_tiny_target(tmp_path / "other", tiny_tokenizer, seed=1)
    refused(collection(target=str(other)), "target.fingerprint [0-9a-f]{64}, this run has [0-9a-f]{64}")


def test_a_moved_target_is_the_same_target(collection: Make, tiny_target_dir: Path, tmp_path: Path) -> None:
    collect(collection())
    moved = shutil.copytree(tiny_target_dir, tmp_path / "moved")
    collect(collection(target=str(moved)))


def test_resume_refuses_a_damaged_shard_and_recovers_when_it_is_deleted(collection: Make) -> None:
    collect(collection())
    before = contents(collection().out)
    name = "features-00000-of-00001-00001"
    path = collection().out / f"{name}.safetensors"
    path.write_bytes(before[path.name][:-1] + b"x")
    refused(collection(), rf"{name}.safetensors: checksum differs .* delete {name}.safetensors and {name}.json")
    path.unlink()
    path.with_suffix(".json").unlink()
    collect(collection())
    assert contents(collection().out) == before


def test_accelerate_that_starts_one_process_in_place_of_several_is_refused(
    collection: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    refused(collection(), "starts one process whatever --num_processes says; give --multi_gpu")
