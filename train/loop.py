"""The one training loop, on accelerate: steps, checkpoints and the log of a run, from start or from where a killed one was."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch
from accelerate import Accelerator

from data_prep.store import FeatureStore
from heads.checkpoint import save_head
from heads.errors import HeadwayError
from train.accelerator import launch_facts
from train.logs import RunLog
from train.method import Method, require_served
from train.recipe import Recipe
from train.sampler import Window, plan, split_rows
from train.scoring import confirm, prompts_to_confirm, turned_over
from train.state import RunFolder
from train.steps import Steps


def train(method: Method, recipe: Recipe, store: FeatureStore, folder: RunFolder, accelerator: Accelerator) -> None:
    """Train `method.head` to the end of the recipe, from the newest checkpoint in `folder` where there is one.

    Raises HeadwayError when nothing is supervised, for a loss that is not finite or a spike, and for a checkpoint of another run.
    """
    run = _Run(prepare(method, recipe, store, accelerator), folder)
    try:
        for window in run.steps.windows[run.steps.step :]:
            run.train_step(window)
            if window.step % recipe.save.every == 0 or window.step == len(run.steps.windows):
                run.checkpoint()
        run.finish()
    finally:
        run.log.close()


def prepare(method: Method, recipe: Recipe, store: FeatureStore, accelerator: Accelerator) -> Steps:
    """The recipe's steps over the store, none of them done. Raises HeadwayError when nothing is supervised."""
    training, validation = split_rows(store, recipe.data.held_out)
    require_served(method, store, training, "training")
    require_served(method, store, validation, "validation")
    optim = recipe.optim
    windows = plan(
        training,
        store.lengths,
        batch_tokens=optim.batch_tokens,
        epochs=optim.epochs,
        max_steps=optim.max_steps,
        seed=recipe.seed,
    )
    return Steps(method, recipe, store, accelerator, windows, validation)


class _Run:
    def __init__(self, steps: Steps, folder: RunFolder) -> None:
        self.steps, self.folder = steps, folder
        self.recipe, self.store, self.accelerator = steps.recipe, steps.store, steps.accelerator
        self.best: dict[str, Any] = {"step": 0, "replayed_tau": 0.0}
        self.latest: dict[str, Any] = {}
        self.parent: dict[str, Any] | None = None
        self.run_id = uuid.uuid4().hex[:12]
        self._resume()
        self.started, self.first_step = time.monotonic(), self.steps.step

    def _resume(self) -> None:
        accelerator, folder = self.accelerator, self.folder
        launch = launch_facts(accelerator)
        half_written, found = folder.half_written(), folder.latest(launch)
        accelerator.wait_for_everyone()  # all have looked before the first one clears up
        if accelerator.is_main_process and folder.checkpoints.exists():
            folder.sweep()
            folder.prune(self.recipe.save.keep_last)
        if found:
            path, state = found
            folder.load(accelerator, path)
            self.best, self.latest, self.run_id = state["best"], state["latest"], state["run_id"]
            self.parent = state["parent"]
            self.steps.recall(state)
        else:
            torch.manual_seed(self.recipe.seed + accelerator.process_index)
        if accelerator.is_main_process:
            folder.out.mkdir(parents=True, exist_ok=True)
        self.log = RunLog(
            folder.out,
            self.recipe.log,
            folder.identity["recipe"],
            run_id=self.run_id,
            start=self.steps.step,
            total=len(self.steps.windows),
            main=accelerator.is_main_process,
            replayed_tau=self.latest.get("replayed_tau"),
        )
        if half_written:
            self.log.say(f"ignored half-written checkpoints: {', '.join(half_written)}")
        self.log.say(
            f"{'going on from step ' + str(self.steps.step) if found else 'training'}: {len(self.steps.windows)} steps, "
            f"{self.steps.trained / 1e6:.1f} M trained parameters, {launch['processes']} process(es) on {accelerator.device.type}, "
            f"{launch['kind']}, precision {launch['precision']}"
        )
        if self.steps.method.parent is not None and not found:
            self._measure_parent(self.steps.method.parent)

    def _measure_parent(self, parent: str) -> None:
        """The head that this one goes on from, on the same texts: it is the best until another one is better."""
        self._validate()
        self.parent = {"replayed_tau": self.best["replayed_tau"], "replayed_rounds": self.best["replayed_rounds"]}
        self.log.say(
            f"{parent}: replayed tau {self.best['replayed_tau']:.3f} on the held-out conversations of this run"
        )

    def train_step(self, window: Window) -> None:
        """One optimizer step, logged."""
        row = self.steps.train_step(window)
        per_step = (time.monotonic() - self.started) / (self.steps.step - self.first_step)
        self.log.step(row, per_step * (len(self.steps.windows) - self.steps.step))

    def checkpoint(self) -> None:
        """Validate, keep the head if it is the best so far, save what a continuation needs."""
        self._validate()
        state = {
            **self.steps.memory(),
            "best": self.best,
            "latest": self.latest,
            "parent": self.parent,
            "run_id": self.run_id,
        }
        self.folder.save(self.accelerator, launch_facts(self.accelerator), state, self.recipe.save.keep_last)

    def _validate(self) -> None:
        accelerator, steps = self.accelerator, self.steps
        self.latest = steps.validate()
        self.log.validation(self.latest)
        if self.latest["replayed_tau"] > self.best["replayed_tau"]:
            self.best = self.latest
            weights = accelerator.get_state_dict(steps.model)
            if accelerator.is_main_process:
                save_head(steps.method.head, self.folder.best(steps.step), {"validation": self.best}, weights)

    def finish(self) -> None:
        """The best head becomes the result."""
        best, latest = self.best, self.latest
        if turned_over(best, latest):
            self.log.say(
                f"validation turned over: replayed tau {best['replayed_tau']:.3f} at step {best['step']}, "
                f"{latest['replayed_tau']:.3f} at the end, while the training loss fell from {best['training_loss']:.3f} to "
                f"{latest['training_loss']:.3f}; the head of step {best['step']} is the result"
            )
        facts = self.steps.method.facts()
        if self.parent is not None:
            facts["parent"] |= self.parent | {"better": best["step"] > 0}
            if best["step"] == 0:
                self.log.say(
                    f"no checkpoint is better than the parent (replayed tau {best['replayed_tau']:.3f}, {latest['replayed_tau']:.3f} at "
                    "the end): the result is the parent itself"
                )
        manifest = {
            **facts,
            "seed": self.recipe.seed,
            "processes": self.accelerator.num_processes,
            "precision": self.accelerator.mixed_precision,
            "steps": len(self.steps.windows),
            "masked_batches": self.steps.masked_batches,
            "best": best,
            "latest": latest,
            "turned_over": turned_over(best, latest),
        }
        if self.accelerator.is_main_process:
            manifest["confirmed"] = self._confirmed()
            self.folder.finish(self.best["step"], manifest)
        self.accelerator.wait_for_everyone()
        if masked := self.steps.masked_batches:
            self.log.say(f"{masked} batches had no supervised row and ran with zero weight")
        self.log.say(f"finished: {self.folder.out} (replayed tau {best['replayed_tau']:.3f} on held-out conversations)")

    def _confirmed(self) -> dict[str, Any] | None:
        """The best head's tau in real decoding, where the recipe asks for it."""
        count = prompts_to_confirm(self.recipe.save.confirm, self.recipe.target)
        if not count:
            return None
        folder, steps = self.folder.best(self.best["step"]), len(self.steps.method.weights)
        try:
            made = confirm(folder, self.recipe.target, self.store, self.steps.validation_rows, count, steps)
        except HeadwayError as error:  # a target that cannot be decoded here is no reason to lose the head
            self.log.say(f"not confirmed by decoding: {error}")
            return {"error": str(error)}
        self.log.say(
            f"decoding {made['prompts']} held-out prompts: tau {made['tau']:.3f}, replayed {made['replayed_tau']:.3f}; "
            f"{made['texts_identical']} of the texts are the stored ones"
        )
        return made
