"""The doctor's script: several faults in one go, a store's texts, what it prints, what it refuses."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data_prep.collect import Settings, collect
from data_prep.conversations import SAMPLES, read_conversations
from data_prep.store import MANIFEST
from eval import doctor
from eval.checkup import texts
from eval.checkup.header import read_header
from eval.checkup.texts import given_texts
from heads.errors import HeadwayError, sha256_file
from tests.eval.clinic import IDS, PAPERS, TAPS, TEXTS, Clinic, Examine, other_target, write_config, write_tensors


def test_all_faults_are_listed_at_once(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    """Also those of the config, where the weights are cut."""
    folder = clinic("eagle3").export("eagle3", "vllm", tmp_path / "head")
    write_config(
        folder, rope_theta=5e5, max_position_embeddings=64, torch_dtype="bfloat16", **{IDS: [tap + 1 for tap in TAPS]}
    )
    write_tensors(folder, lambda tensors: tensors.pop("norm.weight"))
    write_tensors(folder, lambda tensors: tensors.update(more=torch.ones(3)))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    said = diagnose(folder)
    assert said.exit_code == 1
    assert said.errors == ["max_positions", "norm_missing", "rope", "taps", "tensor_extra", "truncated"]
    assert [code for code in said.codes if code not in said.errors] == ["dtype"]
    assert said.report["probe"] is None


def test_a_store_gives_the_texts_without_the_targets_layers(
    clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The head's own held-out conversations where it was trained on that store; one of another target is refused."""
    ward = clinic("eagle3")
    store = tmp_path / "store"
    settings = Settings(ward.conversations, store, str(ward.folder), "2,4,5", "float32", "float32", held_out=0)
    collect(settings)
    folder = ward.export("eagle3", "vllm", tmp_path / "head")
    monkeypatch.setattr(doctor.Target, "load", None)
    said = diagnose(folder, store=store)
    assert (said.codes, said.report["probe"]["conversations"]) == ([], TEXTS)
    assert said.report["probe"]["as_served"]["tau"] == pytest.approx(said.report["probe"]["promised"])
    papers = json.loads((folder / PAPERS).read_text())
    papers["manifest"]["recipe"] = {"data": {"held_out": 2}}
    papers["manifest"]["features"] = {"manifest_sha256": sha256_file(store / MANIFEST)}
    (folder / PAPERS).write_text(json.dumps(papers))
    probe = diagnose(folder, store=store).report["probe"]
    assert probe["conversations"] == 2
    assert probe["floor"] == pytest.approx(1 + 0.8 * (probe["promised"] - 1))
    write_config(folder, **{IDS: [3, 5, 6]})
    said = diagnose(folder, store=store)
    assert (said.codes, said.report["probe"]["as_served"]) == (["taps"], None)
    assert said.report["probe"]["mended"]["tau"] > 2
    other = other_target(ward, tmp_path / "target")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    said = diagnose(folder, store=store, target=str(other))
    assert said.errors == ["other_template", "taps"]
    assert "give a store of this target" in said.report["unprobed"]


def test_another_target_answers_the_bundled_prompts_itself(ward: Clinic):
    """As its own `generate` does; what the embedded one comes with is its own writing already."""
    target = ward.target
    found = given_texts(target, None, 2, 8)
    assert "answered by the target here" in found.source
    assert len(found.texts) == 2
    for text in found.texts:
        given = text.ids_T[text.turn_T == 0]
        made = target.model.generate(given[None], max_new_tokens=8, do_sample=False)[0]
        assert text.ids_T.tolist() == made.tolist()
        assert text.turn_T.tolist() == [0] * len(given) + [1] * (len(made) - len(given))


def test_the_embedded_target_comes_with_answers(ward: Clinic, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(texts, "EMBEDDED", ward.target.name)
    found = given_texts(ward.target, None, 3, 16)
    assert found.source == "3 of the bundled held-out conversations"
    answers = {row.id: row.messages[1]["content"] for row in read_conversations(SAMPLES)}
    for text in found.texts:
        written = text.ids_T[text.turn_T > 0]
        assert len(written) == 16
        assert answers[text.id].startswith(ward.target.tokenizer.decode(written))


def test_what_it_prints(
    clinic: Callable[[str], Clinic],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    ward = clinic("medusa")
    folder = ward.export("medusa", "medusa", tmp_path / "head")
    arguments = ["doctor.py", f"--head={folder}", f"--conversations={ward.conversations}", "--dtype=float32"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert f"{folder}: medusa layout, kind medusa, target '{ward.folder}'" in out
    assert out.splitlines()[-1].startswith("sound (")
    write_config(folder, medusa_num_heads=2)
    assert doctor.main() == 0
    assert "warning: head_count" in capsys.readouterr().out
    write_config(folder, medusa_num_heads=5)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "error: head_count\n    where  " in out
    assert "the config says 5, the file holds 3" in out
    assert out.splitlines()[-1].startswith("NOT SOUND (")


def test_bad_input_is_refused(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    ward = clinic("medusa")
    folder = ward.export("medusa", "medusa", tmp_path / "head")
    for options, message in (
        ({"store": tmp_path, "conversations": tmp_path}, "--store and --conversations: give one"),
        ({"count": 0}, "--count 0: give at least 1"),
        ({"tokens": 1}, "--tokens 1: give at least 2"),
        ({"conversations": tmp_path / "none.jsonl"}, "there is no such file"),
        ({"target": str(tmp_path / "nowhere.d")}, "neither a local folder nor to be had"),
    ):
        with pytest.raises(HeadwayError, match=message):
            diagnose(folder, **options)
    with pytest.raises(HeadwayError, match="no such folder"):
        diagnose(tmp_path / "nothing")
    with pytest.raises(HeadwayError, match="no head of a layout that is known"):
        diagnose(ward.folder)
    (folder / PAPERS).unlink()
    with pytest.raises(HeadwayError, match="which target it belongs to; give it with --target"):
        diagnose(folder)


def test_damaged_papers_and_configs_are_findings(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    ward = clinic("medusa")
    folder = ward.export("medusa", "medusa", tmp_path / "head")
    (folder / PAPERS).write_text("{")
    said = diagnose(folder, target=str(ward.folder))
    assert (said.codes, said.exit_code) == (["config"], 1)
    own = ward.export("medusa", "ours", tmp_path / "own")
    write_config(own, surprise=1)
    said = diagnose(own)
    assert said.codes == ["config"]
    assert "`surprise`" in said.finding("config")["where"]


def test_headers_of_damaged_files(tmp_path: Path):
    """A whole file, one cut at every place, one with bytes behind, one whose header is none."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    content = path.read_bytes()
    header = read_header(path)
    assert header.fault is None
    assert {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()} == {
        "a": ("float32", (4,)),
        "b": ("bfloat16", (2, 3)),
    }
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        header = read_header(path)
        assert header.fault is not None
        assert bool(header.entries) == (cut >= 8 + struct.unpack("<Q", content[:8])[0])
    path.write_bytes(content + b"xy")
    assert "2 bytes too many" in str(read_header(path).fault)
    for text in (b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', b"\xff"):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        assert "header is not the one" in str(read_header(path).fault)
