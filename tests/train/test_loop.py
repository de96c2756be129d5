"""The training loop inside one process: against a hand-written one, split up, and on data that cannot be trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from data_prep.store import FeatureStore, StoredConversation
from heads import load_head
from heads.errors import HeadwayError
from heads.medusa import MedusaHead, pack
from heads.target import TargetEnds
from tests.train.by_hand import held_out_rows
from tests.train.conftest import Run, metrics
from train import medusa
from train.recipe import Data
from train.sampler import plan
from train.steps import learning_rate


def test_weights_equal_a_hand_written_loop(run: Run, features: Path, tiny_target_dir: Path):
    """Twelve steps of AdamW, schedule, clipping and per-head means, one plain batch a step."""
    folder = run("--optim.accumulation=2", "--optim.weight_decay=0.1", "--optim.clip=0.5")
    store = FeatureStore.open(features)
    training = [row for row in range(len(store)) if row not in held_out_rows(store)]
    windows = plan(training, store.lengths, batch_tokens=1024, epochs=3, max_steps=None, seed=3)
    finished = load_head(folder)
    assert isinstance(finished, MedusaHead)
    last = load_file(folder / "checkpoints" / f"step-{len(windows):06d}" / "engine" / "model.safetensors")

    head = MedusaHead(finished.config)
    head.d2t.copy_(finished.d2t)
    head.t2d.copy_(finished.t2d)
    lm_head_VH = TargetEnds.load(str(tiny_target_dir), "float32").lm_head_weight
    head.lm_head.weight.data.copy_(lm_head_VH[finished.target_ids()])
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for window in windows:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(window.step, len(windows), 3e-3, 0.25)
        means = [[], [], []]
        for row in window.rows:
            stored = store[row]
            logits_TKD = head.draft_logits(stored.last_TH)
            for k in range(3):
                for t in range(len(stored.ids_T) - 2 - k):
                    turns = set(stored.turn_T[t + 1 : t + 3 + k].tolist())
                    label = int(stored.ids_T[t + 2 + k])
                    if len(turns) == 1 and turns != {0} and head.t2d[label]:
                        draft = head.target_ids().tolist().index(label)
                        means[k].append(F.cross_entropy(logits_TKD[t, k], torch.tensor(draft)))
        optimizer.zero_grad()
        sum(0.8**k * torch.stack(means[k]).mean() for k in range(3)).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_accumulation_changes_neither_figures_nor_weights(run: Run):
    """Case 2: the same windows in one pass, or in three of which some are empty."""
    whole, split = run(out="whole"), run("--optim.accumulation=7", out="split")
    for a, b in zip(metrics(whole, "train"), metrics(split, "train"), strict=True):
        for key in ("rows", "rows_in_draft_vocabulary", "conversations", "tokens"):
            assert a[key] == b[key]
        for key in ("losses", "accuracy", "conditional", "grad_norm", "tau"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    left, right = load_head(whole).state_dict(), load_head(split).state_dict()
    for name in left:
        assert (left[name].double() - right[name].double()).norm() <= 1e-5 * left[name].double().norm(), name


def change_store(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let every conversation read from a store pass through `change(row, stored)`."""
    original = FeatureStore.__getitem__
    monkeypatch.setattr(FeatureStore, "__getitem__", lambda self, row: change(row, original(self, row)))


def masked(stored: StoredConversation) -> StoredConversation:
    return replace(stored, turn_T=torch.zeros_like(stored.turn_T))


def test_batches_without_a_supervised_row_run_and_are_counted(
    run: Run, features: Path, monkeypatch: pytest.MonkeyPatch
):
    """Case 5: every third conversation is masked; with small windows whole batches are."""
    bare = {row for row in range(40) if row % 3 == 0} - set(held_out_rows(FeatureStore.open(features)))
    change_store(monkeypatch, lambda row, stored: masked(stored) if row in bare else stored)
    folder = run("--optim.batch_tokens=64", "--optim.epochs=1", "--save.every=50")
    rows = metrics(folder, "train")
    assert rows[-1]["masked_batches"] == sum(row["rows"][0] == 0 for row in rows) > 3
    assert all(row["loss"] == 0.0 for row in rows if row["rows"][0] == 0)
    assert load_head(folder).manifest["masked_batches"] == rows[-1]["masked_batches"]
    assert all(torch.isfinite(tensor).all() for tensor in load_head(folder).state_dict().values())


def test_nothing_supervised_is_an_error_that_names_the_rows(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    change_store(monkeypatch, lambda row, stored: masked(stored))
    with pytest.raises(HeadwayError, match=r"none of the 34 training conversations \(tiny-7-0000, tiny-7-0002, "):
        run()
    assert not (tmp_path / "head").exists()


def test_more_held_out_than_there_are_is_refused(run: Run):
    with pytest.raises(HeadwayError, match=r"data\.held_out is 40, and .* holds 40 conversations"):
        run("--data.held_out=40")


def test_soft_labels_and_the_shared_output_train(run: Run, tiny_target_dir: Path):
    """The KL to the target's law falls; a shared output stays the target's own."""
    folder = run('--head.losses={"kl": 1.0}', "--head.output=shared", "--optim.epochs=10", "--optim.lr=1e-2")
    rows = metrics(folder, "train")
    assert sum(row["loss"] for row in rows[-3:]) < 0.9 * sum(row["loss"] for row in rows[:3])
    head = load_head(folder)
    assert torch.equal(
        head.lm_head.weight, TargetEnds.load(str(tiny_target_dir), "float32").lm_head_weight[head.target_ids()]
    )
    trained = run("--head.output=shared", "--head.train_output=true", "--optim.max_steps=3", out="trained")
    assert not torch.equal(load_head(trained).lm_head.weight, head.lm_head.weight)


def test_packing_keeps_conversations_apart(features: Path, tiny_target_dir: Path):
    """Rows of one pack equal those of its conversations taken one by one."""
    store = FeatureStore.open(features)
    recipe = medusa.MedusaRecipe(data=Data(held_out=6), head=medusa.Heads(draft_vocab_size=None))
    method = medusa.MedusaMethod(recipe, store, TargetEnds.load(str(tiny_target_dir), "float32"))
    rows = [store[row] for row in range(5)]
    together, apart = method.batch(rows), [method.batch([row]) for row in rows]
    assert torch.equal(method.counts(together), sum(method.counts(batch) for batch in apart))
    assert torch.equal(together["next_P"], torch.cat([pack(r.last_TH, r.ids_T, r.turn_T)[1] for r in rows]))
    assert method.counts(method.batch([])).tolist() == [0] * 4
