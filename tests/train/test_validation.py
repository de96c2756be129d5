"""What a checkpoint is worth: its figures counted by hand, the best one chosen, and decoded with at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_prep.store import FeatureStore
from eval.decode import Settings, decode
from eval.drafters.medusa import MedusaDrafter
from heads import load_head
from heads.checkpoint import CONFIG
from heads.target import Target
from tests.train.by_hand import counted, held_out_rows, walked
from tests.train.conftest import Run, metrics, weights
from train import scoring, steps


def test_validation_figures_equal_brute_force(run: Run, features: Path):
    """The logged accuracies and tau, counted again by drafting at every row of the held-out conversations."""
    folder = run()
    head, store, row = load_head(folder), FeatureStore.open(features), metrics(folder, "validation")
    best = max(row, key=lambda figures: figures["replayed_tau"])
    by_hand = counted((store[index], head.draft_ids(store[index].last_TH)) for index in held_out_rows(store))
    assert best["rows"] == by_hand["rows"]
    for key in ("accuracy", "conditional"):
        assert best[key] == pytest.approx(by_hand[key])
    conditional = by_hand["conditional"]
    tau = 1 + conditional[0] * (1 + conditional[1] * (1 + conditional[2]))
    assert best["tau"] == pytest.approx(tau)
    assert best["rows_in_draft_vocabulary"] < best["rows"]
    rounds = [round_ for index in held_out_rows(store) for round_ in walked(head, store[index])]
    assert best["replayed_rounds"] == len(rounds)
    assert best["replayed_tokens"] == sum(rounds)
    assert best["replayed_tau"] == pytest.approx(sum(rounds) / len(rounds))
    assert load_head(folder).manifest["best"]["tau"] == best["tau"]


def test_the_best_head_is_confirmed_by_decoding(run: Run, features: Path, capsys: pytest.CaptureFixture[str]):
    """The figures are those of decoding and replaying the same first answers with the finished head, done here again."""
    folder = run("--save.confirm=3")
    store, head = FeatureStore.open(features), load_head(folder)
    target = Target.load(head.manifest["target"]["name"], "float32", "cpu")
    decoded, replayed, identical = [], [], 0
    for row in held_out_rows(store)[:3]:
        stored = store[row]
        ids, turns = stored.ids_T.tolist(), stored.turn_T.tolist()
        start = turns.index(1)
        end = start + min(turns.count(1), scoring.CONFIRM_TOKENS)
        ledger = decode(target, MedusaDrafter(head), [ids[:start]], Settings(end - start))
        decoded += [round_.emitted for round_ in ledger.rounds]
        identical += ledger.outputs[0].ids == ids[start:end]
        first_T = (torch.arange(len(ids)) >= start) & (torch.arange(len(ids)) < end)
        replayed += walked(head, replace(stored, turn_T=first_T.long()))
    made = head.manifest["confirmed"]
    assert made["prompts"] == 3
    assert made["texts_identical"] == identical
    assert made["tau"] == pytest.approx(sum(decoded) / len(decoded))
    assert made["replayed_tau"] == pytest.approx(sum(replayed) / len(replayed))
    assert "decoding 3 held-out prompts: tau" in capsys.readouterr().out
    assert load_head(run(out="unconfirmed")).manifest["confirmed"] is None


def test_what_is_confirmed_unless_asked(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch):
    assert scoring.prompts_to_confirm(None, str(tiny_target_dir)) == scoring.CONFIRM_PROMPTS
    assert scoring.prompts_to_confirm(9, str(tiny_target_dir)) == 9
    monkeypatch.setattr(scoring, "SMALL_BYTES", 1000)
    assert scoring.prompts_to_confirm(None, str(tiny_target_dir)) == 0


def test_a_turn_over_is_a_fall_of_tau_while_the_loss_falls():
    def record(tau: float, loss: float) -> dict[str, float]:
        return {"replayed_tau": tau, "training_loss": loss}

    assert scoring.turned_over(record(2.0, 1.5), record(1.9, 1.2))
    assert not scoring.turned_over(record(2.0, 1.5), record(1.9, 1.6))
    assert not scoring.turned_over(record(2.0, 1.5), record(2.0, 1.2))


def test_the_best_checkpoint_is_the_result_and_a_turn_over_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Case 3: tau rises to step 6 and falls afterwards, while the training loss goes on falling."""
    original = steps.Steps.validate
    bent = {"replayed_tau": lambda step: 2 - abs(step - 6) / 10}
    monkeypatch.setattr(
        steps.Steps, "validate", lambda self: {**original(self), **{key: of(self.step) for key, of in bent.items()}}
    )
    folder = run("--save.keep_last=1")
    losses = {row["step"]: row["training_loss"] for row in metrics(folder, "validation")}
    last = max(losses)
    assert losses[6] == pytest.approx(sum(row["loss"] for row in metrics(folder, "train")[3:6]) / 3)
    said = f"validation turned over: replayed tau 2.000 at step 6, {2 - (last - 6) / 10:.3f} at the end, while the training "
    said += f"loss fell from {losses[6]:.3f} to {losses[last]:.3f}; the head of step 6 is the result"
    assert said in capsys.readouterr().out
    manifest = load_head(folder).manifest
    assert (manifest["best"]["step"], manifest["turned_over"]) == (6, True)
    assert weights(folder) == weights(folder / "checkpoints" / "best-000006")
    assert weights(folder) != weights(run("--optim.max_steps=6", out="at-6"))  # another schedule
    assert json.loads((folder / CONFIG).read_text())["kind"] == "medusa"
