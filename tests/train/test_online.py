"""Training on conversations without a store: equal to training on the store of them, resumed bit for bit, and over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from data_prep.store import FeatureStore
from heads.errors import HeadwayError
from heads.target import Target
from tests.conftest import make_conversations, write_conversations
from tests.train.conftest import Run, in_process, killed_after, make_store, metrics, weights, write_recipe
from tests.train.test_processes import DDP, LAUNCH, ROOT, free_port, launch
from train import eagle, medusa, online
from train.eagle import Eagle, EagleRecipe
from train.medusa import MedusaRecipe
from train.online import OnlinePlan, OnlineStore, plan_online, read, text_of
from train.recipe import Data, Online


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("online") / "tiny.jsonl", make_conversations(30, 7))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """What collection makes of the same conversations, in fp32, with the taps of the tiny target."""
    return make_store(tmp_path_factory.mktemp("offline"), tiny_target_dir, make_conversations(30, 7), "1,2,3")


@pytest.fixture
def recipe_file(tmp_path: Path, conversations: Path, tiny_target_dir: Path) -> Path:
    recipe = {
        "target": str(tiny_target_dir),
        "out": str(tmp_path / "head"),
        "seed": 3,
        "precision": "fp32",
        "data": {
            "conversations": str(conversations),
            "held_out": 5,
            "online": {"batch_tokens": 300, "dtype": "float32"},
        },
        "head": {"draft_vocab_size": 40},
        "optim": {"lr": 3e-3, "epochs": 2, "batch_tokens": 600, "warmup": 0.25},
        "save": {"every": 3, "confirm": 0},
        "log": {"wandb": "off"},
    }
    return write_recipe(tmp_path / "online.yaml", recipe)


@pytest.fixture
def train(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """An EAGLE-3 head on conversations alone."""
    return in_process(eagle.main, recipe_file, tmp_path, monkeypatch)


def offline(store: Path) -> tuple[str, ...]:
    return ("--data.conversations=null", f"--data.features={store}")


def equal_runs(left: Path, right: Path) -> None:
    """The same windows and rows; losses and validations to fp32 rounding."""
    ours, theirs = metrics(left, "train"), metrics(right, "train")
    assert len(ours) == len(theirs) >= 6
    for a, b in zip(ours, theirs, strict=True):
        assert (a["rows"], a["conversations"], a["tokens"]) == (b["rows"], b["conversations"], b["tokens"])
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    for a, b in zip(metrics(left, "validation"), metrics(right, "validation"), strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-5)
        assert a["replayed_tau"] == pytest.approx(b["replayed_tau"])
        assert a["replayed_rounds"] == b["replayed_rounds"]


@pytest.mark.parametrize("method", [eagle, medusa])
def test_online_equals_offline(
    recipe_file: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
):
    run = in_process(method.main, recipe_file, tmp_path, monkeypatch)
    equal_runs(run("--optim.accumulation=2", out="online"), run("--optim.accumulation=2", *offline(store), out="store"))


def test_a_killed_online_run_ends_with_the_same_bits(train: Run):
    expected = train(out="uninterrupted")
    with killed_after(4):
        train()
    assert weights(train()) == weights(expected)
    assert metrics(train(), "validation") == metrics(expected, "validation")  # finished: not trained again


@pytest.mark.parametrize("split", [False, True], ids=["whole", "tensor_parallel"])
def test_two_processes_equal_one_on_a_store(train: Run, recipe_file: Path, store: Path, tmp_path: Path, split: bool):
    """A target in each of two gloo processes, and one over both by transformers' plan."""
    single = train(*offline(store), out="single")
    command = [*LAUNCH, *DDP, "--main_process_port", free_port(), str(ROOT / "train" / "eagle.py")]
    options = [f"--config={recipe_file}", f"--out={tmp_path / 'double'}", f"--data.online.tensor_parallel={split}"]
    code, output = launch([*command, *options], timeout=600)
    assert code == 0, output
    assert "2 process(es) on cpu" in output
    equal_runs(tmp_path / "double", single)


def opened(recipe: Any, said: list[str] | None = None) -> tuple[OnlinePlan, OnlineStore]:
    planned = plan_online(recipe, torch.device("cpu"), (said if said is not None else []).append)
    return planned, OnlineStore.load(planned, recipe, Accelerator(cpu=True))


def eagle_recipe(target: Path, conversations: Path, **data: Any) -> EagleRecipe:
    settings = Data(
        conversations=str(conversations), held_out=5, online=Online(dtype="float32", batch_tokens=600), **data
    )
    return EagleRecipe(target=str(target), data=settings, head=Eagle())


def test_the_reader_is_a_store_of_the_same_rows(tiny_target_dir: Path, conversations: Path, store: Path):
    stored = FeatureStore.open(store)
    planned, reader = opened(eagle_recipe(tiny_target_dir, conversations))
    assert reader.conversation_ids == stored.conversation_ids
    assert (reader.lengths, reader.tokens, reader.supervised_tokens) == (
        stored.lengths,
        stored.tokens,
        stored.supervised_tokens,
    )
    assert (len(reader), reader.taps) == (len(stored), stored.taps)
    assert reader.conversations_by_hash() == stored.conversations_by_hash()
    assert torch.equal(reader.supervised_counts(), stored.supervised_counts())
    assert {key: planned.manifest["totals"][key] for key in ("tokens", "supervised_tokens")} == {
        key: stored.manifest["totals"][key] for key in ("tokens", "supervised_tokens")
    }
    rows = [7, 0, 29, 7]
    for ours, theirs in zip([*read(reader, rows), reader[11]], [*read(stored, rows), stored[11]], strict=True):
        assert ours.id == theirs.id
        assert ours.taps.keys() == theirs.taps.keys()
        for mine, its in [(ours.ids_T, theirs.ids_T), (ours.turn_T, theirs.turn_T), (ours.top1_T, theirs.top1_T)]:
            assert mine.dtype == its.dtype
            assert torch.equal(mine, its)
        for mine, its in [
            (ours.last_TH, theirs.last_TH),
            (ours.lse_T, theirs.lse_T),
            *((ours.taps[t], theirs.taps[t]) for t in (1, 2, 3)),
        ]:
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


def test_a_window_goes_through_the_target_in_few_passes_and_held_out_rows_once(
    tiny_target_dir: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
):
    _, reader = opened(eagle_recipe(tiny_target_dir, conversations))
    passes: list[list[int]] = []
    original = online.run_target

    def counted(target: Target, batch: Any, *rest: Any) -> Any:
        passes.append([row.entry.length for row in batch])
        return original(target, batch, *rest)

    monkeypatch.setattr(online, "run_target", counted)
    held_out = [row for rows in reader.conversations_by_hash()[:5] for row in rows]
    training = [row for row in range(len(reader)) if row not in held_out][:12]
    read(reader, training)
    lengths = [length for each in passes for length in each]
    assert sorted(lengths) == lengths == sorted(reader.lengths[row] for row in training)  # bucketed, each row once
    assert [len(each) for each in passes] == [6, 4, 2]  # 6 x 85, 4 x 139 and 2 x 164 tokens: no more fit into 600
    passes.clear()
    for row in held_out:
        text_of(reader, row)
    assert not passes  # counting tokens asks no target
    first = read(reader, held_out)
    seen = len(passes)
    assert [a is b for a, b in zip(first, read(reader, held_out), strict=True)] == [True] * 5
    assert len(passes) == seen > 0
    read(reader, training[:2])
    assert len(passes) > seen  # training rows are not kept
    stored = first[0]
    assert stored.last_TH.untyped_storage().nbytes() == stored.last_TH.nbytes  # not a view of its whole pass


def test_another_file_cut_or_dtype_is_another_run(train: Run, conversations: Path, tmp_path: Path):
    train("--optim.max_steps=3")
    changed = write_conversations(tmp_path / "changed.jsonl", make_conversations(29, 7))
    changed.replace(other := tmp_path / conversations.name)
    with pytest.raises(HeadwayError, match=r"was trained with data.conversations .*, this run has"):
        train("--optim.max_steps=3", f"--data.conversations={other}")
    with pytest.raises(HeadwayError, match=r"was trained with data.max_length 2048, this run has 60"):
        train("--optim.max_steps=3", "--data.max_length=60")
    kept = conversations.read_text()
    try:
        conversations.write_text(other.read_text())
        with pytest.raises(HeadwayError, match=r"was trained with features.manifest_sha256"):
            train("--optim.max_steps=3")
    finally:
        conversations.write_text(kept)


def test_long_conversations_are_cut_and_counted_or_refused(tiny_target_dir: Path, tmp_path: Path):
    rows = make_conversations(6, 7)
    rows[2]["messages"][-1]["content"] = "the cat sat on a mat " * 15
    file = write_conversations(tmp_path / "long.jsonl", rows)
    said: list[str] = []
    whole = plan_online(eagle_recipe(tiny_target_dir, file), torch.device("cpu"), said.append)
    longest = max(row.entry.length for row in whole.planned)
    assert not said
    cut = plan_online(eagle_recipe(tiny_target_dir, file, max_length=longest - 1), torch.device("cpu"), said.append)
    assert max(row.entry.length for row in cut.planned) == longest - 1
    assert said == [
        f"1 of 6 sequences fill the {longest - 1} tokens of max_length, and what lies behind is not learnt (first: {rows[2]['id']})"
    ]
    rows[2]["messages"][-1]["content"] *= 6
    write_conversations(file, rows)
    with pytest.raises(HeadwayError, match=rf"{rows[2]['id']}: \d+ tokens, but target .* has 512 positions"):
        plan_online(eagle_recipe(tiny_target_dir, file), torch.device("cpu"), said.append)


def test_a_split_target_is_not_decoded_with_by_one_process(tiny_target_dir: Path):
    recipe = EagleRecipe(target=str(tiny_target_dir), data=Data(conversations="x", online=Online(tensor_parallel=True)))
    with pytest.raises(HeadwayError, match=r"save\.confirm is None; it must be 0 with data\.online\.tensor_parallel"):
        recipe.check()
    recipe.save.confirm = 0
    recipe.check()


def test_the_taps_are_those_that_the_head_reads(tiny_target_dir: Path):
    recipe = EagleRecipe(target=str(tiny_target_dir), data=Data(conversations="x"))
    assert recipe.taps() == (1, 2, 3)  # 4 layers
    recipe.head.taps = (0, 3)
    assert recipe.taps() == (0, 3)
    recipe.head.taps = (1, 4)
    with pytest.raises(HeadwayError, match=r"head.taps is \[1, 4\]; target .* has layers 0 to 3"):
        recipe.taps()
    assert EagleRecipe(head=Eagle(kind="eagle")).taps() == MedusaRecipe().taps() == ()
