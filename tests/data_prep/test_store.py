"""The store gives back what was put in, and never anything else."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.sealed_json import write_sealed
from data_prep.shards import Layout, StoredConversation, finished_shards, sweep
from data_prep.store import FeatureStore, StoredTaps
from data_prep.store_manifest import COUNTS, MANIFEST, read_manifest, refuse_other, write_manifest
from heads.errors import HeadwayError
from tests.data_prep.made_stores import (
    HIDDEN,
    PACKED,
    RUN,
    TAPS,
    VOCABULARY,
    assert_equal,
    in_fork,
    make,
    make_store,
    write_shards,
)


@pytest.fixture(scope="module")
def rows() -> list[StoredConversation]:
    return [make("b", 5), make("d", 7), make("a", 9), make("c", 3)]


@pytest.fixture
def store(tmp_path: Path, rows: list[StoredConversation]) -> Path:
    return make_store(tmp_path / "store", [rows[:2], rows[2:]])


def test_reader_gives_every_conversation_back_in_the_order_of_ids(store: Path, rows: list[StoredConversation]) -> None:
    opened = FeatureStore.open(store)
    assert opened.conversation_ids == ["a", "b", "c", "d"]
    assert opened.lengths == [9, 5, 3, 7]
    assert (len(opened), opened.tokens, opened.supervised_tokens) == (4, 24, 24 - 4 * 2)
    for got, put in zip(opened, sorted(rows, key=lambda row: row.id), strict=True):
        assert_equal(got, replace(put, top_k_ids_TK=None, top_k_logits_TK=None))
        assert got.last_TH.dtype == torch.bfloat16
        assert got.ids_T.dtype == got.turn_T.dtype == got.top1_T.dtype == torch.int64


def test_reading_does_not_depend_on_the_shards(store: Path, rows: list[StoredConversation], tmp_path: Path) -> None:
    other = FeatureStore.open(make_store(tmp_path / "other", [[row] for row in reversed(rows)]))
    for left, right in zip(FeatureStore.open(store), other, strict=True):
        assert_equal(left, right)


def test_supervised_counts_are_those_of_the_supervised_tokens(store: Path, rows: list[StoredConversation]) -> None:
    expected = Counter(
        int(token)
        for row in rows
        for token, turn in zip(row.ids_T.tolist(), row.turn_T.tolist(), strict=True)
        if turn > 0
    )
    counts_V = FeatureStore.open(store).supervised_counts()
    assert counts_V.shape == (VOCABULARY,)
    assert {token: int(count) for token, count in enumerate(counts_V) if count} == expected


def test_totals(store: Path) -> None:
    totals = read_manifest(store)["totals"]
    assert totals["conversations"] == 4
    assert totals["tokens"] == 24
    assert totals["supervised_tokens"] == 16
    assert totals["bytes"] == sum(path.stat().st_size for path in store.glob("features-*.safetensors"))


@pytest.mark.parametrize("tap_format", ["fp32", "bf16", "int8", "fp8"])
def test_taps_come_back_within_their_bound_and_the_rest_as_it_was(
    tmp_path: Path, rows: list[StoredConversation], tap_format: str
) -> None:
    run = PACKED | {"tap_format": tap_format}
    opened = FeatureStore.open(make_store(tmp_path / "store", [rows[:2], rows[2:]], run))
    for got, put in zip(opened, sorted(rows, key=lambda row: row.id), strict=True):
        assert list(got.taps) == list(TAPS)
        assert_equal(replace(got, taps={}), replace(put, taps={}))
        for tap in TAPS:
            put_TH = put.taps[tap].double()
            largest_TH = torch.cat(
                [each.abs().amax(1, keepdim=True).expand_as(each) for each in put_TH.split(64, 1)], 1
            )
            bound_TH = {
                "fp32": 0 * put_TH,
                "bf16": 0 * put_TH,  # what was put there is bf16
                "int8": largest_TH / 127 / 2 * (1 + 2**-7),  # a scale is rounded up to bf16
                "fp8": torch.maximum(put_TH.abs() / 16, largest_TH / 448 / 1024 * (1 + 2**-7)),
            }[tap_format]
            assert bool(((got.taps[tap].double() - put_TH).abs() <= bound_TH).all())
            expected = torch.bfloat16 if tap_format == "bf16" else torch.float32
            assert got.taps[tap].dtype == expected
        with pytest.raises(KeyError):
            got.taps[2]


def test_a_store_without_logits_gives_none(store: Path) -> None:
    row = FeatureStore.open(store)[0]
    assert row.top_k_ids_TK is None
    assert row.top_k_logits_TK is None


def test_a_tap_is_read_when_it_is_asked_for(tmp_path: Path, rows: list[StoredConversation]) -> None:
    """Taps of several methods lie side by side: none pays for those of another."""
    row = FeatureStore.open(make_store(tmp_path / "store", [rows], PACKED))[1]
    asked: list[str] = []

    class Watched:
        def get_slice(self, name: str) -> Any:
            asked.append(name)
            return tensors.get_slice(name)

    assert isinstance(row.taps, StoredTaps)
    tensors, row.taps._tensors = row.taps._tensors, Watched()
    assert row.taps[3].shape == (5, HIDDEN)
    assert asked == ["tap_3", "tap_3_scale"]


def test_bytes_per_token_by_part() -> None:
    layout = Layout(hidden_size=576, taps=(2, 15, 27), dtype="bfloat16", tap_format="bf16", top_k=0)
    assert layout.bytes_by_part() == {"ids and marks": 14, "last state": 1152, "taps": 3456}
    assert layout.bytes_per_token() <= 2 * 576 * 4 * 1.01
    packed = replace(layout, tap_format="int8", top_k=8)
    assert packed.bytes_by_part() == {
        "ids and marks": 14,
        "last state": 1152,
        "taps": 3 * (576 + 9 * 2),
        "top-k logits": 8 * 8,
    }
    states = [sum(each.bytes_by_part()[part] for part in ("last state", "taps")) for each in (packed, layout)]
    assert states[0] / states[1] <= 0.65
    assert replace(packed, top_k=0).bytes_per_token() / layout.bytes_per_token() <= 0.65
    assert replace(layout, dtype="float32", taps=()).bytes_per_token() == 576 * 4 + 14


@pytest.mark.parametrize("tap_format", ["bf16", "int8", "fp8"])
def test_files_are_as_large_as_the_layout_says(tmp_path: Path, tap_format: str) -> None:
    """2,400 tokens a shard: beside them a file holds a header and the bounds of its conversations, and there is a sidecar."""
    run = PACKED | {"tap_format": tap_format}
    store = make_store(tmp_path / "store", [[make(f"{shard}-{n}", 200 + n) for n in range(12)] for shard in "ab"], run)
    tokens, expected = read_manifest(store)["totals"]["tokens"], Layout.of(run).bytes_per_token()
    for path in store.glob("features-*.safetensors"):
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        assert len(content) - header - 13 * 8 == expected * tokens / 2
        assert header < 1500
    assert sum(path.stat().st_size for path in store.glob("features-*")) / tokens <= expected * 1.03


def test_processes_read_one_store_at_once(store: Path, rows: list[StoredConversation]) -> None:
    """Opened once, read in three forked processes and here."""
    opened = FeatureStore.open(store)
    assert opened[3].id == "d"
    with ThreadPoolExecutor(3) as pool:  # a thread waits for each process
        runs = [pool.submit(in_fork, lambda: [float(row.taps[3].double().sum()) for row in opened]) for _ in range(3)]
        sums = [run.result() for run in runs]
    assert sums == [[float(row.taps[3].double().sum()) for row in sorted(rows, key=lambda row: row.id)]] * 3


def test_files_can_be_read_by_others(store: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    assert {path.stat().st_mode for path in store.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def damage(path: Path, offset: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= bit
    path.write_bytes(content)


SHARD = "features-00000-of-00001-00001"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda store: damage(store / f"{SHARD}.safetensors", -1), f"{SHARD}.safetensors: checksum"),
        (lambda store: (store / f"{SHARD}.safetensors").write_bytes(b"short"), f"{SHARD}.safetensors: 5 bytes"),
        (lambda store: (store / f"{SHARD}.safetensors").unlink(), f"{SHARD}.safetensors: the shard .* missing"),
        (lambda store: (store / f"{SHARD}.json").unlink(), f"{SHARD}.safetensors: listed in the manifest"),
        (lambda store: (store / f"{SHARD}.json").write_text("{"), f"{SHARD}.json: not JSON"),
        (lambda store: (store / f"{SHARD}.json").write_text("[]"), f"{SHARD}.json: not a JSON object"),
        (lambda store: (store / f"{SHARD}.json").write_text('{"file": 1}'), f"{SHARD}.json: its content does not fit"),
        (lambda store: write_sealed(store / f"{SHARD}.json", {"file": 1}), f"{SHARD}.json: not a shard's sidecar"),
        (lambda store: damage(store / COUNTS, -1), f"{COUNTS}: checksum"),
        (lambda store: (store / COUNTS).unlink(), f"{COUNTS}: missing"),
        (lambda store: (store / MANIFEST).unlink(), f"{MANIFEST}: missing"),
        (lambda store: (store / MANIFEST).write_text('{"kind": "medusa"}'), f"{MANIFEST}: not the manifest of a feat"),
        (lambda store: write_manifest(store, RUN), "did not finish"),
        (lambda store: write_manifest(store, read_manifest(store) | {"schema": 1}), f"{MANIFEST}: schema 1, this"),
    ],
)
def test_damage_is_refused_by_name(store: Path, change: Any, named: str) -> None:
    change(store)
    with pytest.raises(HeadwayError, match=named):
        FeatureStore.open(store)


def test_an_edited_manifest_is_refused(store: Path) -> None:
    manifest = json.loads((store / MANIFEST).read_text())
    manifest["taps"] = [0, 3]
    (store / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(HeadwayError, match=r"manifest\.json: its content does not fit its checksum"):
        FeatureStore.open(store)


def test_another_shard_in_the_place_of_one_is_refused(store: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", [[make("x", 4)], [make("y", 4)]])
    for suffix in ("json", "safetensors"):
        shutil.copy(other / f"{SHARD}.{suffix}", store)
    with pytest.raises(HeadwayError, match=f"{SHARD}.safetensors: not the shard the manifest lists"):
        FeatureStore.open(store)


def test_an_edited_sidecar_is_refused_before_there_is_a_manifest_that_lists_it(
    tmp_path: Path, rows: list[StoredConversation]
) -> None:
    """What a killed collection left is read when it goes on: two conversations that have changed places, say."""
    folder = write_shards(tmp_path / "begun", [rows[:2], rows[2:]])
    sidecar = folder / f"{SHARD}.json"
    content = json.loads(sidecar.read_text())
    content["conversations"].reverse()
    sidecar.write_text(json.dumps(content))
    with pytest.raises(HeadwayError, match=rf"{SHARD}\.json: its content does not fit its checksum; delete {SHARD}"):
        finished_shards(folder, checksums=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", {"name": "made-up", "fingerprint": "ef" * 32, "dtype": "float32"}),
        ("target", {"name": "made-up", "fingerprint": "ab" * 32, "dtype": "bfloat16"}),
        ("dtype", "float32"),
        ("tap_format", "int8"),
        ("top_k_logits", 4),
        ("taps", [1]),
        ("max_length", 32),
    ],
)
def test_another_run_is_refused_with_both_values(key: str, value: Any) -> None:
    with pytest.raises(HeadwayError) as caught:
        refuse_other(Path("folder"), RUN, RUN | {key: value})
    was, now = RUN[key], value
    if key == "target":
        differing = "fingerprint" if was["fingerprint"] != now["fingerprint"] else "dtype"
        was, now = was[differing], now[differing]
    assert f"{was}, this run has {now}" in str(caught.value)


def test_the_name_of_a_target_may_change() -> None:
    refuse_other(Path("folder"), RUN, RUN | {"target": RUN["target"] | {"name": "moved"}})


def test_sweep_removes_what_is_half_written_and_nothing_else(store: Path) -> None:
    whole = sorted(path.name for path in store.iterdir())
    (store / ".features-x.safetensors.12.tmp").write_text("half")
    (store / f"{SHARD}.json").rename(store / ".moved.tmp")
    assert sweep(store) == [".features-x.safetensors.12.tmp", ".moved.tmp", f"{SHARD}.safetensors"]
    assert sorted(path.name for path in store.iterdir()) == [name for name in whole if not name.startswith(SHARD)]


@pytest.mark.parametrize("shards", [[["twice"], ["twice"]], [["other"], ["twice", "twice"]]])
def test_a_conversation_that_is_there_twice_is_refused(tmp_path: Path, shards: list[list[str]]) -> None:
    with pytest.raises(HeadwayError, match=r"00001\.safetensors: conversation twice is there twice"):
        make_store(tmp_path / "store", [[make(name, 4) for name in names] for names in shards])
