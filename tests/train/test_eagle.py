"""The EAGLE trainer: its figures, going on from a parent, targets of all sizes, and what it can learn by heart."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from data_prep.store import FeatureStore
from heads import Eagle1Head, Eagle3Head, load_head
from heads.checkpoint import MANIFEST, WEIGHTS
from heads.eagle import EagleHead
from heads.errors import HeadwayError, sha256_file
from heads.target import TargetEnds
from heads.vocabulary import choose_vocabulary
from tests.conftest import make_conversations, random_answers, save_tiny_target
from tests.heads.plain_eagle import PlainUnroll
from tests.train.by_hand import counted
from tests.train.conftest import (
    Run,
    eagle_recipe,
    in_process,
    killed_after,
    make_store,
    metrics,
    weights,
    write_recipe,
)
from train import eagle
from train.prepare import special_ids, supervised_counts
from train.sampler import split_rows

EAGLE1 = (
    "--head.kind=eagle",
    "--head.draft_vocab_size=null",
    '--head.losses={"smooth_l1": 1.0, "kl": 0.1}',
    "--head.noise=0.1",
)


@pytest.fixture
def train(tapped: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """An EAGLE head by `eagle_recipe`."""
    recipe = write_recipe(tmp_path / "eagle.yaml", eagle_recipe(tapped, tiny_target_dir))
    return in_process(eagle.main, recipe, tmp_path, monkeypatch)


def read(folder: Path) -> EagleHead:
    head = load_head(folder)
    assert isinstance(head, EagleHead)
    return head


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_validation_figures_equal_a_plain_unroll(
    train: Run, tapped: Path, tiny_target_dir: Path, kind: str, capsys: pytest.CaptureFixture[str]
):
    """The best checkpoint's logged accuracies, counted again on every row of the held-out conversations."""
    folder = train(*(EAGLE1 if kind == "eagle" else ()))
    assert "coverage: training " in capsys.readouterr().out
    head, store, ends = read(folder), FeatureStore.open(tapped), TargetEnds.load(str(tiny_target_dir), "float32")
    assert isinstance(head, Eagle1Head if kind == "eagle" else Eagle3Head)
    drafted = []
    for row in split_rows(store, 5)[1]:
        stored = store[row]
        states_TF = torch.cat([stored.taps[tap] for tap in head.taps] or [stored.last_TH], 1)
        with torch.no_grad():
            logits_STD = PlainUnroll(head)(states_TF, ends.embed(stored.ids_T), 3, ends.logits)
        drafted.append((stored, head.target_ids()[logits_STD.argmax(-1)].T))
    best, by_hand = head.manifest["best"], counted(drafted)
    assert best["rows"] == by_hand["rows"]
    for key in ("accuracy", "conditional"):
        assert best[key] == pytest.approx(by_hand[key])
    rows = metrics(folder, "train")
    assert rows[-1]["loss"] < 0.95 * rows[0]["loss"]
    assert head.manifest["made_by"] == "train/eagle.py"


def test_a_killed_run_draws_the_same_noise_again(train: Run):
    """Case 13, where random numbers matter: EAGLE-1's noise on the features."""
    expected = train(*EAGLE1, out="uninterrupted")
    with killed_after(4):
        train(*EAGLE1)
    assert weights(train(*EAGLE1)) == weights(expected)


def test_going_on_from_a_parent_keeps_its_vocabulary(train: Run, tiny_target_dir: Path, tmp_path: Path):
    """Case 10: on text whose frequent tokens are others; another size, kind or shape is refused."""
    parent = train("--optim.max_steps=3", out="parent")
    other = make_store(tmp_path, tiny_target_dir, make_conversations(12, 99), "1,2,3")
    features = f"--data.features={other}"
    child = train(f"--head.parent={parent}", features, "--optim.max_steps=1", "--optim.lr=1e-9", out="child")
    ids = [read(folder).target_ids().tolist() for folder in (parent, child)]
    counts_V = supervised_counts(FeatureStore.open(other), 5)["training"]
    specials = special_ids(TargetEnds.load(str(tiny_target_dir), "float32").tokenizer)
    assert ids[0] == ids[1] != choose_vocabulary(counts_V, 40, specials).ids_D.tolist()
    assert read(child).manifest["parent"]["manifest_sha256"] == sha256_file(parent / MANIFEST)
    before, after = load_file(parent / WEIGHTS), load_file(child / WEIGHTS)
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-6, msg=name)
    for change, message in [
        (["--head.draft_vocab_size=41"], "its draft_vocab_size is 40, the recipe and the target ask for 41"),
        (["--head.fc_norm=true"], "its fc_norm is False"),
        (EAGLE1, "a head of kind 'eagle3', head.kind is 'eagle'"),
    ]:
        with pytest.raises(HeadwayError, match=message):
            train(f"--head.parent={parent}", *change, out="refused")
        assert not (tmp_path / "refused").exists()


def test_what_is_not_better_than_its_parent_is_not_the_result(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Case 17: both replay the same held-out conversations; a step that ruins the head leaves the parent, and says so."""
    weak = train("--optim.max_steps=1", out="weak")
    good = train(f"--head.parent={weak}", "--optim.epochs=30", out="good")
    made = read(good).manifest
    own = made["best"]["replayed_tau"]
    assert made["parent"]["better"]
    assert own > made["parent"]["replayed_tau"] == read(weak).manifest["best"]["replayed_tau"]
    ruined = train(f"--head.parent={good}", "--optim.max_steps=4", "--optim.lr=100", "--save.every=2", out="ruined")
    made = read(ruined).manifest
    assert made["parent"]["replayed_tau"] == own == made["best"]["replayed_tau"] >= made["latest"]["replayed_tau"]
    assert (made["parent"]["better"], made["best"]["step"]) == (False, 0)
    before, after = load_file(good / WEIGHTS), load_file(ruined / WEIGHTS)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "no checkpoint is better than the parent" in capsys.readouterr().out


def test_a_vocabulary_larger_than_the_text_is_filled_alike_each_time(train: Run, caplog: pytest.LogCaptureFixture):
    """Case 11."""
    short = ("--head.draft_vocab_size=250", "--optim.max_steps=1")
    with caplog.at_level(logging.WARNING):
        ids_D = read(train(*short, out="one")).target_ids()
    assert any("only" in message and "of its 250 tokens were seen" in message for message in caplog.messages)
    assert torch.equal(ids_D, read(train(*short, out="two")).target_ids())
    assert len(ids_D.unique()) == 250


def test_full_vocabulary_and_a_frozen_output(train: Run, tiny_target_dir: Path):
    """D = V has no map; an output that is not trained stays the target's rows."""
    folder = train("--head.draft_vocab_size=null", "--head.train_output=false", "--optim.max_steps=2")
    head = read(folder)
    assert "d2t" not in head.state_dict()
    assert torch.equal(
        head.state_dict()["lm_head.weight"], TargetEnds.load(str(tiny_target_dir), "float32").lm_head_weight
    )


@pytest.mark.parametrize(("layers", "taps"), [(1, "0"), (2, "0,1"), (5, "1,2,4")])
def test_small_targets(train: Run, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, layers: int, taps: str):
    """Case 18: fewer than 8 layers, tied embeddings, an lm_head padded past the tokenizer."""
    target = save_tiny_target(
        tmp_path / "target",
        tiny_tokenizer,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        vocab_size=len(tiny_tokenizer) + 13,
    )
    store = make_store(tmp_path, target, make_conversations(8, 7), taps)
    head = read(train(f"--target={target}", f"--data.features={store}", "--data.held_out=2", "--optim.max_steps=2"))
    assert head.config.vocab_size == len(tiny_tokenizer) + 13
    assert ",".join(map(str, head.taps)) == taps


def test_a_store_without_the_taps_is_refused(train: Run, features: Path, tmp_path: Path):
    with pytest.raises(HeadwayError, match=r"collect with --taps 1,2,3 into a new folder"):
        train(f"--data.features={features}")
    with pytest.raises(HeadwayError, match=r"head.taps is \[4\]; target .* has layers 0 to 3"):
        train("--head.taps=[4]")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize("start", ["target", "random"])
def test_where_a_new_head_starts(
    kind: Literal["eagle3", "eagle"], start: Literal["target", "random"], tiny_target_dir: Path
):
    ends = TargetEnds.load(str(tiny_target_dir), "float32")
    settings = eagle.Eagle(kind=kind, start=start, draft_vocab_size=None, taps=(1, 2, 3) if kind == "eagle3" else None)
    head = eagle._new_head(settings, ends, torch.zeros(ends.vocab_size, dtype=torch.int64))
    identity_HH = torch.eye(ends.hidden_size)
    assert torch.equal(head.fc.weight[:, -ends.hidden_size :], identity_HH) == (start == "target")
    assert (head.layers[0].mlp.down_proj.weight.abs().max() == 0) == (start == "target")


def test_it_learns_short_conversations_by_heart(train: Run, tiny_target_dir: Path, tmp_path: Path):
    """Eight answers of ten random words: what comes next is learnt, at every step. The ninth is held out."""
    store = make_store(tmp_path, tiny_target_dir, random_answers(9, words=10), "1,2,3")
    settings = ("--data.held_out=1", "--optim.epochs=90", "--optim.batch_tokens=1000", "--optim.lr=2e-2")
    shape = ("--head.draft_vocab_size=null", '--head.losses={"ce": 1.0}', "--save.every=1000")
    last = metrics(train(f"--data.features={store}", *settings, *shape), "train")[-1]
    assert min(last["accuracy"]) > 0.95, last["accuracy"]
