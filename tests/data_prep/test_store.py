"""The store gives back what was put in, and never anything else."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.store import (
    COUNTS,
    MANIFEST,
    Entry,
    FeatureStore,
    StoredConversation,
    bytes_per_token,
    finish,
    finished_shards,
    free_names,
    read_manifest,
    refuse_other,
    sweep,
    write_manifest,
    write_shard,
)
from heads.errors import HeadwayError

HIDDEN, VOCABULARY, TAPS = 8, 50, (1, 3)
RUN: dict[str, Any] = {
    "schema": 1,
    "kind": "features",
    "complete": False,
    "target": {"name": "made-up", "fingerprint": "ab" * 32, "dtype": "float32"},
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "taps": list(TAPS),
    "max_length": 64,
    "conversations_sha256": "cd" * 32,
}


def make(identity: str, length: int, dtype: torch.dtype = torch.bfloat16) -> StoredConversation:
    random_numbers = torch.Generator().manual_seed(length)

    def states() -> torch.Tensor:
        return torch.randn(length, HIDDEN, generator=random_numbers).to(dtype)

    turn_T = (torch.arange(length) >= 2).long()
    top1_T = torch.randint(0, VOCABULARY, (length,), generator=random_numbers)
    return StoredConversation(
        id=identity,
        ids_T=torch.randint(0, VOCABULARY, (length,), generator=random_numbers),
        turn_T=turn_T,
        last_TH=states(),
        taps={tap: states() for tap in TAPS},
        top1_T=torch.where(turn_T.roll(-1) > 0, top1_T, -1),
        lse_T=torch.rand(length, generator=random_numbers),
    )


def entry_of(row: StoredConversation) -> Entry:
    return Entry(row.id, row.id * 3, len(row.ids_T), int((row.turn_T > 0).sum()))


def make_store(folder: Path, shards: list[list[StoredConversation]]) -> Path:
    folder.mkdir()
    for shard, name in zip(shards, free_names(folder, 0, 1), strict=False):
        write_shard(folder, name, [entry_of(row) for row in shard], shard)
    finish(folder, RUN, finished_shards(folder, checksums=True))
    return folder


def assert_equal(left: StoredConversation, right: StoredConversation) -> None:
    assert left.id == right.id
    assert left.taps.keys() == right.taps.keys()
    for name in ("ids_T", "turn_T", "last_TH", "top1_T", "lse_T"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert all(torch.equal(left.taps[tap], right.taps[tap]) for tap in left.taps)


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
        assert_equal(got, put)
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


def test_totals_and_file_sizes(store: Path) -> None:
    totals = read_manifest(store)["totals"]
    assert totals["conversations"] == 4
    assert totals["tokens"] == 24
    assert totals["supervised_tokens"] == 16
    assert totals["bytes"] == sum(path.stat().st_size for path in store.glob("features-*.safetensors"))
    # 3 states of 8 numbers of 2 bytes, and int32 + int16 + int32 + float32
    assert bytes_per_token(HIDDEN, len(TAPS), "bfloat16") == 3 * 8 * 2 + 14


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
        (lambda store: (store / f"{SHARD}.json").write_text('{"file": 1}'), f"{SHARD}.json: not a shard's sidecar"),
        (lambda store: damage(store / COUNTS, -1), f"{COUNTS}: checksum"),
        (lambda store: (store / COUNTS).unlink(), f"{COUNTS}: missing"),
        (lambda store: (store / MANIFEST).unlink(), f"{MANIFEST}: missing"),
        (lambda store: (store / MANIFEST).write_text('{"kind": "medusa"}'), f"{MANIFEST}: not the manifest of a feat"),
        (lambda store: write_manifest(store, RUN), "did not finish"),
        (lambda store: write_manifest(store, read_manifest(store) | {"schema": 2}), f"{MANIFEST}: schema 2"),
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


def test_random_damage_never_changes_the_data_silently(store: Path, rows: list[StoredConversation]) -> None:
    source = random.Random(0)
    intact = {path: path.read_bytes() for path in sorted(store.iterdir())}
    before = list(FeatureStore.open(store))
    refused: list[tuple[str, str]] = []
    for _ in range(300):
        path = source.choice(list(intact))
        damage(path, source.randrange(len(intact[path])), 1 << source.randrange(8))
        try:
            opened = list(FeatureStore.open(store))
        except HeadwayError as error:
            refused.append((path.name.split(".")[0], str(error)))
        else:
            assert path.name == MANIFEST  # a change of its white space is no change of what it says
            for left, right in zip(opened, before, strict=True):
                assert_equal(left, right)
        path.write_bytes(intact[path])
    assert len(refused) > 280
    assert all(name in message for name, message in refused)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", {"name": "made-up", "fingerprint": "ef" * 32, "dtype": "float32"}),
        ("target", {"name": "made-up", "fingerprint": "ab" * 32, "dtype": "bfloat16"}),
        ("dtype", "float32"),
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


def test_a_conversation_in_two_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"00001\.safetensors: conversation twice lies in another shard"):
        make_store(tmp_path / "store", [[make("twice", 4)], [make("twice", 4)]])
