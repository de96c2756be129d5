"""Case 16: whatever happens to the files of a store, training reads what was written, or an error that names a file."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

from data_prep.shards import finished_shards
from data_prep.store import FeatureStore
from data_prep.store_manifest import COUNTS, MANIFEST
from heads.errors import HeadwayError
from tests.data_prep.made_stores import PACKED, assert_equal, make, make_store, write_shards

CORRUPTIONS = 1000
Files = dict[str, bytes]
Corrupt = Callable[[random.Random, Files, Files], Files]


def flip(source: random.Random, files: Files, _: Files) -> Files:
    """One bit of a file, or some in a row."""
    name = source.choice(sorted(files))
    content = bytearray(files[name])
    begin = source.randrange(len(content))
    for place in range(begin, min(len(content), begin + source.choice([1, 1, 1, 8, 64]))):
        content[place] ^= 1 << source.randrange(8)
    return {name: bytes(content)}


def truncate(source: random.Random, files: Files, _: Files) -> Files:
    """An end that is missing, or bytes behind the end."""
    name = source.choice(sorted(files))
    if source.random() < 0.2:
        return {name: files[name] + source.randbytes(source.randint(1, 64))}
    return {name: files[name][: source.randrange(len(files[name]))]}


def delete(source: random.Random, files: Files, _: Files) -> Files:
    """A file, or a shard with its sidecar (an empty content stands for no file)."""
    name = source.choice(sorted(files))
    names = [each for each in files if Path(each).stem == Path(name).stem] if source.random() < 0.3 else [name]
    return dict.fromkeys(names, b"")


def swap(source: random.Random, files: Files, others: Files) -> Files:
    """Two files of the store for each other, or a file (or shard with sidecar) of a store of other conversations."""
    name = source.choice(sorted(files))
    if source.random() < 0.5:
        other = source.choice(sorted(set(files) - {name}))
        return {name: files[other], other: files[name]}
    if source.random() < 0.5:
        return {name: others[name]}
    return {each: others[each] for each in files if Path(each).stem == Path(name).stem}


def edit(source: random.Random, files: Files, _: Files) -> Files:
    """A value of a JSON file, at any depth."""
    name = source.choice([each for each in sorted(files) if each.endswith(".json")])
    content = json.loads(files[name])
    holder, key = source.choice(places(content))
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = source.choice([value + 1, -value - 1, float(value), str(value), None])
    elif isinstance(value, str):
        at = source.randrange(len(value) + 1)
        holder[key] = source.choice([value[:at] + "0" + value[at:], "", value.upper() + "!", None, 7])
    elif isinstance(holder, dict) and source.random() < 0.5:
        del holder[key]
    else:
        holder[key] = source.choice([{}, [], "0", None])
    return {name: json.dumps(content, indent=1).encode()}


def places(content: Any) -> list[tuple[Any, Any]]:
    """Every place in nested objects and lists, as (what holds it, its key)."""
    found: list[tuple[Any, Any]] = []
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        found.append((content, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


def double(source: random.Random, files: Files, _: Files) -> Files:
    """A row twice: in a sidecar's or the manifest's list, in the tensors of a shard, or a whole shard under a new number."""
    name = source.choice([each for each in sorted(files) if each != COUNTS])
    if name.endswith(".json"):
        content = json.loads(files[name])
        rows = content["shards" if name == MANIFEST else "conversations"]
        at = source.randrange(len(rows))
        rows.insert(source.randint(0, len(rows)), rows[at])
        if source.random() < 0.5:
            del rows[source.randrange(len(rows))]  # one twice, and maybe another one gone
        return {name: json.dumps(content, indent=1).encode()}
    if source.random() < 0.3:
        copy = name.replace("-00000.", "-00009.").replace("-00001.", "-00009.").replace("-00002.", "-00009.")
        return {copy: files[name], Path(copy).with_suffix(".json").name: files[Path(name).with_suffix(".json").name]}
    tensors = load(files[name])
    begin, end = tensors["offsets"][:2].tolist()
    for key in set(tensors) - {"offsets"}:
        put = source.randrange(len(tensors[key]))
        rows = tensors[key][begin:end][: len(tensors[key]) - put].clone()
        tensors[key][put : put + len(rows)] = rows
    return {name: save(tensors)}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Files]:
    """A store of int8 taps with top-k logits in three shards, and the files of another one like it."""
    folder = tmp_path_factory.mktemp("stores")
    shards = [[make("b", 5), make("d", 7)], [make("a", 9), make("c", 3)], [make("e", 6), make("f", 6)]]
    others = [[make("p", 8), make("q", 4)], [make("r", 5)], [make("s", 4), make("t", 4)]]
    other = make_store(folder / "other", others, PACKED)
    return make_store(folder / "store", shards, PACKED), contents(other)


def contents(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def outcome(read: Callable[[], list[Any]]) -> list[Any] | str:
    """What a reader gives, all of it, or what it says."""
    try:
        return read()
    except HeadwayError as error:
        return str(error)


def test_no_corruption_changes_the_data_without_a_word(stores: tuple[Path, Files]) -> None:
    folder, others = stores
    source = random.Random(20)
    files, untouched = contents(folder), list(FeatureStore.open(folder))
    refused: Counter[str] = Counter()
    for number in range(CORRUPTIONS):
        corrupt: Corrupt = (flip, truncate, delete, swap, edit, double)[number % 6]
        changed = corrupt(source, files, others)
        write(folder, changed)
        said = outcome(lambda: list(FeatureStore.open(folder)))
        if isinstance(said, str):
            refused[corrupt.__name__] += 1
            assert any(Path(name).stem in said for name in changed), (said, sorted(changed))
        else:
            assert not changes(files, changed), (corrupt.__name__, sorted(changed))
            for left, right in zip(said, untouched, strict=True):
                assert_equal(left, right)
        write(folder, {name: files.get(name, b"") for name in changed})
    print(f"{CORRUPTIONS} corruptions, refused: {dict(refused)}")
    assert contents(folder) == files
    assert sum(refused.values()) > 0.95 * CORRUPTIONS


def write(folder: Path, changed: Files) -> None:
    for name, content in changed.items():
        if content:
            (folder / name).write_bytes(content)
        else:
            (folder / name).unlink(missing_ok=True)


def changes(files: Files, changed: Files) -> bool:
    """Whether a corruption changed what the files say: white space of JSON and equal bytes do not."""
    for name, content in changed.items():
        if content == files.get(name):
            continue
        if not name.endswith(".json") or name not in files:
            return True
        try:
            if json.loads(content) != json.loads(files[name]):
                return True
        except ValueError:
            return True
    return False


def test_a_shard_that_a_killed_run_left_is_trusted_as_little(tmp_path: Path) -> None:
    """Before there is a manifest that lists it: the shard's own sidecar tells, and the sidecar's own seal."""
    folder = write_shards(tmp_path / "begun", [[make("b", 5), make("d", 7)], [make("a", 9), make("c", 3)]], PACKED)
    source = random.Random(21)
    files, whole = contents(folder), finished_shards(folder, checksums=True)
    refused = 0
    for number in range(100):
        corrupt: Corrupt = (flip, truncate, edit)[number % 3]
        changed = corrupt(source, files, files)
        write(folder, changed)
        said = outcome(lambda: finished_shards(folder, checksums=True))
        if isinstance(said, str):
            refused += 1
            assert any(Path(name).stem in said for name in changed)
        else:
            assert said == whole or not changes(files, changed)
            assert [shard.entries for shard in said] == [shard.entries for shard in whole]
        write(folder, files)
    assert refused > 90
