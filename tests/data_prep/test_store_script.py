"""`data_prep/store.py info` and `verify`: what a store holds, and whether it is what was written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data_prep import store as script
from data_prep.store_manifest import COUNTS, MANIFEST, write_manifest
from heads.errors import run_script
from tests.data_prep.made_stores import PACKED, RUN, make, make_store, write_shards

SHARD = "features-00000-of-00001-00001"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", [[make("b", 5), make("d", 7)], [make("a", 9)], [make("c", 3)]], PACKED)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `python data_prep/store.py ...`."""
    monkeypatch.setattr(sys, "argv", ["store.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        run_script(script.main)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_info_says_what_a_store_holds(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "info", store) == 0
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    size = sum(path.stat().st_size for path in store.iterdir())
    assert "complete" in said["state"]
    assert "made-up (abababababab) in float32" in said["target"]
    assert "made-up.jsonl (cdcdcdcdcdcd)" in said["made"]
    assert "4 conversations, 24 tokens, 16 supervised (66.7%)" in said["holds"]
    assert "last in bfloat16; taps 1,3 (entering layer i) in int8" in said["states"]
    assert "the 3 largest logits" in said["teacher"]
    # 72 channels are two groups of a scale each: 72 + 2 x 2 bytes a tap; a logit has 4 bytes and its id too.
    parts = "334 bytes: ids and marks 14, last state 144, taps 152, top-k logits 24"
    assert parts in said["a"]
    assert f"{size:,} bytes in 3 shards, {size / 24:,.1f} a token" in said["on"]


def test_info_of_a_store_that_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = write_shards(tmp_path / "begun", [[make("b", 5)]])
    write_manifest(begun, RUN)
    assert run(monkeypatch, "info", begun) == 0
    said = capsys.readouterr().out
    assert "not finished; run data_prep/collect.py again" in said
    assert "1 conversations, 5 tokens, 3 supervised" in said
    assert "top-1 and log-sum-exp" in said
    assert run(monkeypatch, "verify", begun) == 2
    assert "begun: the collection did not finish" in capsys.readouterr().err


def test_verify_of_a_whole_store(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "verify", store) == 0
    assert f"whole; 3 shards with 4 conversations, {COUNTS} and {MANIFEST} are as written" in capsys.readouterr().out


def test_verify_names_what_is_damaged(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store / f"{SHARD}.safetensors")
    assert run(monkeypatch, "verify", store) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert f"{SHARD}.safetensors: checksum differs" in said.err
    damage(store / "features-00000-of-00001-00002.json")
    assert run(monkeypatch, "verify", store) == 2
    said = capsys.readouterr()
    assert f"{SHARD}.safetensors: checksum differs" in said.out
    assert "features-00000-of-00001-00002.json: " in said.out
    assert "store: 2 of 3 shards are damaged, as listed" in said.err


@pytest.mark.parametrize("name", [COUNTS, MANIFEST])
def test_verify_looks_at_more_than_shards(
    store: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store / name)
    assert run(monkeypatch, "verify", store) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("info",), "folder"), (("look", "x"), "look"), (("verify", "no/such"), "manifest.json: missing")],
)
def test_bad_command_lines(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
