"""The training loop inside one process: against a hand-written one, killed anywhere, and on data that cannot be trained on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from data_prep.store import FeatureStore, StoredConversation
from eval.decode import Settings, decode
from eval.drafters.medusa import MedusaDrafter
from heads import load_head
from heads.checkpoint import CONFIG, WEIGHTS
from heads.errors import HeadwayError
from heads.medusa import MedusaHead, pack
from heads.target import Target, TargetEnds
from tests.conftest import save_tiny_target
from tests.train.conftest import Run, metrics
from train import loop, medusa, prepare, scoring, state
from train.loop import learning_rate
from train.recipe import Data
from train.sampler import plan


def weights(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def held_out_rows(store: FeatureStore, count: int = 6) -> list[int]:
    order = sorted(range(len(store)), key=lambda row: sha256(store.conversation_ids[row].encode()).hexdigest())
    return sorted(order[:count])


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
    lm_head_VH = TargetEnds.load(str(tiny_target_dir)).lm_head_weight
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


def test_validation_figures_equal_brute_force(run: Run, features: Path):
    """The logged accuracies and tau, counted again by drafting at every row of the held-out conversations."""
    folder = run()
    head, store, row = load_head(folder), FeatureStore.open(features), metrics(folder, "validation")
    best = max(row, key=lambda figures: figures["replayed_tau"])
    served, correct, reached, accepted = ([0] * 3 for _ in range(4))
    for index in held_out_rows(store):
        stored = store[index]
        ids_TK = head.draft_ids(stored.last_TH)
        for t in range(len(stored.ids_T)):
            prefix = True
            for k in range(3):
                turns = stored.turn_T[t + 1 : t + 3 + k].tolist()
                if len(turns) < k + 2 or turns[0] == 0 or len(set(turns)) > 1:
                    continue
                right = bool(ids_TK[t, k] == stored.ids_T[t + 2 + k])
                served[k] += 1
                correct[k] += right
                reached[k] += prefix
                prefix = prefix and right
                accepted[k] += prefix
    conditional = [a / max(1, r) for a, r in zip(accepted, reached, strict=True)]
    assert best["rows"] == served
    assert best["accuracy"] == pytest.approx([c / s for c, s in zip(correct, served, strict=True)])
    assert best["conditional"] == pytest.approx(conditional)
    tau = 1 + conditional[0] * (1 + conditional[1] * (1 + conditional[2]))
    assert best["tau"] == pytest.approx(tau)
    assert best["rows_in_draft_vocabulary"] < best["rows"]
    rounds = [round_ for index in held_out_rows(store) for round_ in walked(head, store[index])]
    assert best["replayed_rounds"] == len(rounds)
    assert best["replayed_tokens"] == sum(rounds)
    assert best["replayed_tau"] == pytest.approx(sum(rounds) / len(rounds))
    assert load_head(folder).manifest["best"]["tau"] == best["tau"]


def walked(head: MedusaHead, stored: StoredConversation) -> list[int]:
    """Tokens of every round, by drafting at each root and stepping on by what was right and one more."""
    emitted, ids, turns = [], stored.ids_T.tolist(), stored.turn_T.tolist()
    for turn in sorted(set(turns) - {0}):
        root, end = turns.index(turn), len(turns) - turns[::-1].index(turn)
        while root + 1 < end:
            drafts = head.draft_ids(stored.last_TH[root - 1 : root])[0].tolist()
            right = 0
            while right < len(drafts) and root + 1 + right < end and drafts[right] == ids[root + 1 + right]:
                right += 1
            emitted.append(min(right + 1, end - root - 1))
            root += emitted[-1]
    return emitted


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


class Killed(BaseException):
    """Stands for a SIGKILL."""


def test_killed_at_any_moment_it_ends_with_the_same_weights(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Case 13. Die at the n-th of the moments below for n = 0, 1, 2, ..., again and again in one folder, until it finishes."""
    expected = run(out="uninterrupted")
    moments: list[tuple[Any, str]] = [
        (loop._Run, "train_step"),
        (loop._Run, "validate"),
        (loop, "save_head"),
        (state.Accelerator, "save_state"),
        (state, "_sync_tree"),
        (state.os, "replace"),
        (state.RunFolder, "_prune"),
        (state, "save_head"),
    ]
    passed, fatal, deaths, finished = 0, 0, 0, False
    for place, name in moments:
        original = getattr(place, name)

        def guarded(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed > fatal:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, guarded)
    while not finished:
        passed = 0
        try:
            run(out="killed")
            finished = True
        except Killed:
            deaths += 1
            fatal += 1
    assert deaths > 10
    folder = expected.parent / "killed"
    assert weights(folder) == weights(expected)
    manifests = [json.loads((f / "manifest.json").read_text()) for f in (folder, expected)]
    for manifest in manifests:
        del manifest["recipe"]["out"]
    assert manifests[0] == manifests[1]
    assert sorted(os.listdir(folder / "checkpoints")) == sorted(os.listdir(expected / "checkpoints"))
    timing = ("seconds", "tokens_per_s")
    for kind in ("train", "validation"):
        rows = [
            [{key: value for key, value in row.items() if key not in timing} for row in metrics(f, kind)]
            for f in (folder, expected)
        ]
        assert rows[0] == rows[1]
    assert "ignored half-written checkpoints: step-0000" in capsys.readouterr().out


def test_a_finished_run_says_so_and_another_recipe_is_refused(run: Run, capsys: pytest.CaptureFixture[str]):
    folder = run()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run("--log.project=elsewhere")
    assert "already finished" in capsys.readouterr().out
    with pytest.raises(HeadwayError, match=r"was trained with optim\.lr 0\.003, this run has 0\.01; .* delete"):
        run("--optim.lr=1e-2")
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let training die after so many steps; returns what undoes it."""
    patch = pytest.MonkeyPatch()
    original = loop._Run.train_step

    def step(self: Any, window: Any) -> None:
        if window.step > steps:
            raise Killed
        original(self, window)

    patch.setattr(loop._Run, "train_step", step)
    return patch.undo


def test_a_continuation_that_differs_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    undo = stop_after(7, monkeypatch)
    with pytest.raises(Killed):
        run()
    undo()
    with pytest.raises(HeadwayError, match=r"was trained with head\.num_heads 3, this run has 2"):
        run("--head.num_heads=2")
    latest = max((tmp_path / "head" / "checkpoints").glob("step-*"))
    saved = json.loads((latest / "state.json").read_text())
    for change, message in [
        ({"processes": 2}, "saved by 2 processes, this run has 1; .* resume with 2"),
        (
            {"features": {**saved["features"], "manifest_sha256": "0" * 64}},
            "was trained with features.manifest_sha256 000",
        ),
        ({"target": {**saved["target"], "fingerprint": "0" * 64}}, "was trained with target.fingerprint 000"),
    ]:
        (latest / "state.json").write_text(json.dumps(saved | change))
        with pytest.raises(HeadwayError, match=message):
            run()


def test_keeps_the_last_checkpoints_and_the_best(run: Run):
    folder = run("--save.every=1", "--save.keep_last=3")
    total, best = metrics(folder, "train")[-1]["step"], load_head(folder).manifest["best"]["step"]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert [name for name in names if name.startswith("step-")] == [f"step-{total - i:06d}" for i in (2, 1, 0)]
    assert f"best-{best:06d}" in names
    assert not [name for name in names if name.startswith(".")]


def test_the_best_checkpoint_is_the_result_and_a_turn_over_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Case 3: tau rises to step 6 and falls afterwards, while the training loss goes on falling."""
    original = loop._Run.validate
    bent = {"replayed_tau": lambda step: 2 - abs(step - 6) / 10}
    monkeypatch.setattr(
        loop._Run, "validate", lambda self: {**original(self), **{key: of(self.step) for key, of in bent.items()}}
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


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def spoiled(row: int, stored: StoredConversation) -> StoredConversation:
        return replace(stored, last_TH=stored.last_TH * float("nan")) if spoil else stored

    spoil = False
    change_store(monkeypatch, spoiled)
    original = loop._Run.train_step

    def step(self: Any, window: Any) -> None:
        nonlocal spoil
        spoil = window.step == 5
        original(self, window)

    monkeypatch.setattr(loop._Run, "train_step", step)
    with pytest.raises(HeadwayError, match=r"not finite at step 5 \(conversations tiny-7-.*lower optim\.lr"):
        run()
    assert [path.name for path in (tmp_path / "head" / "checkpoints").glob("step-*")] == ["step-000003"]
    monkeypatch.setattr(loop._Run, "train_step", original)
    spoil = False
    assert weights(run()) == weights(run(out="other"))


def test_features_of_another_target_are_refused(run: Run, tmp_path: Path, tiny_tokenizer: Any):
    other = save_tiny_target(tmp_path / "other-target", tiny_tokenizer, seed=9)
    with pytest.raises(HeadwayError, match=r"collected from target .*tiny-target.* the recipe's is .*other-target"):
        run(f"--target={other}")
    assert not (tmp_path / "head").exists()


def test_a_folder_that_holds_something_else_is_refused(run: Run, tmp_path: Path, tiny_target_dir: Path):
    shutil.copytree(tiny_target_dir, tmp_path / "model")
    with pytest.raises(HeadwayError, match="holds a model that no training run wrote"):
        run(out="model")
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match="a file, not a folder"):
        run(out="file")


def test_soft_labels_and_the_shared_output_train(run: Run, tiny_target_dir: Path):
    """The KL to the target's law falls; a shared output stays the target's own."""
    folder = run('--head.losses={"kl": 1.0}', "--head.output=shared", "--optim.epochs=10", "--optim.lr=1e-2")
    rows = metrics(folder, "train")
    assert sum(row["loss"] for row in rows[-3:]) < 0.9 * sum(row["loss"] for row in rows[:3])
    head = load_head(folder)
    assert torch.equal(head.lm_head.weight, TargetEnds.load(str(tiny_target_dir)).lm_head_weight[head.target_ids()])
    trained = run("--head.output=shared", "--head.train_output=true", "--optim.max_steps=3", out="trained")
    assert not torch.equal(load_head(trained).lm_head.weight, head.lm_head.weight)


class CappedEnds:
    """Ends of a target whose output function is not a plain product (Gemma-2's soft cap)."""

    def __init__(self, cap: float | None) -> None:
        self.lm_head_weight, self.cap, self.widest = (
            torch.randn(30, 8, generator=torch.Generator().manual_seed(0)),
            cap,
            0,
        )

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        self.widest = max(self.widest, len(last))
        logits = last @ self.lm_head_weight.T
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@pytest.mark.parametrize("cap", [None, 20.0])
def test_the_teacher_is_the_targets_own_output_function(cap: float | None):
    ids_D, ends = torch.tensor([1, 4, 9, 20]), CappedEnds(cap)
    last_CH = 2 * torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    teacher = prepare.restricted_output(ends, ids_D, last_CH[:5])
    torch.testing.assert_close(teacher(last_CH), ends.logits(last_CH)[:, ids_D])
    ends.widest = 0
    teacher(last_CH)
    assert (ends.widest == 0) == (cap is None)  # a plain product multiplies the draft vocabulary's rows alone


def test_packing_keeps_conversations_apart(features: Path, tiny_target_dir: Path):
    """Rows of one pack equal those of its conversations taken one by one."""
    store = FeatureStore.open(features)
    recipe = medusa.MedusaRecipe(data=Data(held_out=6), head=medusa.Heads(draft_vocab_size=None))
    method = medusa.MedusaMethod(recipe, store, TargetEnds.load(str(tiny_target_dir)))
    rows = [store[row] for row in range(5)]
    together, apart = method.batch(rows), [method.batch([row]) for row in rows]
    assert torch.equal(method.counts(together), sum(method.counts(batch) for batch in apart))
    assert torch.equal(together["next_P"], torch.cat([pack(r.last_TH, r.ids_T, r.turn_T)[1] for r in rows]))
    assert method.counts(method.batch([])).tolist() == [0] * 4


def test_wandb_is_offline_without_a_key_and_the_key_stays_out_of_the_files(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import wandb

    started: list[dict[str, Any]] = []

    class Recorder:
        def log(self, values: dict[str, float], step: int) -> None:
            started[-1].setdefault("rows", []).append((step, values))

        def finish(self) -> None:
            started[-1]["finished"] = True

    def init(**settings: Any) -> Recorder:
        started.append(settings)
        return Recorder()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    key = "0123456789" * 4
    for mode, logged_in, expected in [
        ("auto", False, "offline"),
        ("auto", True, "online"),
        ("offline", True, "offline"),
    ]:
        monkeypatch.setattr(wandb, "login", lambda logged_in=logged_in, **_: logged_in)
        monkeypatch.setenv("WANDB_API_KEY", key)
        out = f"{mode}-{logged_in}"
        folder = run(f"--log.wandb={mode}", "--optim.max_steps=4", out=out)
        assert started[-1]["mode"] == expected
        assert started[-1]["finished"]
        assert [step for step, _ in started[-1]["rows"]] == [1, 2, 3, 3, 4, 4]
        assert started[-1]["rows"][0][1]["train/accuracy_2"] == metrics(folder, "train")[0]["accuracy"][2]
        assert key not in str(started[-1]["config"])
        assert not [path for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    count = len(started)
    run("--log.wandb=off", "--optim.max_steps=2", out="off")
    assert len(started) == count
    assert key not in capsys.readouterr().out
