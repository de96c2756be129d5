"""The one training loop, on accelerate: any head that returns loss numerators and counts from one forward call.

The loss of a step is sum_k weight_k * (sum over rows of head k's loss) / (number of such rows), both taken over ALL processes and
accumulation steps, so it depends on neither padding, batch split nor world size. Shapes: K heads (or steps).
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from data_prep.store import FeatureStore
from eval.replay import Replayed
from heads.checkpoint import save_head
from heads.errors import HeadwayError
from train.figures import Totals
from train.logs import RunLog
from train.method import Method, require_served
from train.online import read
from train.recipe import Recipe
from train.sampler import Window, in_chunks, plan, shares, split_rows
from train.scoring import confirm, gathered, prompts_to_confirm, turned_over, whole_head
from train.state import RunFolder


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Of step 1..total: a linear rise over the first `warmup` share, then half a cosine towards 0."""
    rising = round(warmup * total)
    if step <= rising:
        return peak * step / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising - 1) / max(1, total - rising)))


def train(method: Method, recipe: Recipe, store: FeatureStore, folder: RunFolder, accelerator: Accelerator) -> None:
    """Train `method.head` to the end of the recipe, from the newest checkpoint in `folder` where there is one.

    Raises HeadwayError when nothing is supervised, when a loss stops being finite, and for a checkpoint of another run.
    """
    run = _Run(method, recipe, store, folder, accelerator)
    try:
        for window in run.windows[run.step :]:
            run.train_step(window)
            if window.step % recipe.save.every == 0 or window.step == len(run.windows):
                run.checkpoint()
        run.finish()
    finally:
        run.log.close()


class _Run:
    def __init__(
        self, method: Method, recipe: Recipe, store: FeatureStore, folder: RunFolder, accelerator: Accelerator
    ) -> None:
        self.method, self.recipe, self.store, self.folder, self.accelerator = method, recipe, store, folder, accelerator
        training, self.validation_rows = split_rows(store, recipe.data.held_out)
        require_served(method, store, training, "training")
        require_served(method, store, self.validation_rows, "validation")
        optim = recipe.optim
        self.windows = plan(
            training,
            store.lengths,
            batch_tokens=optim.batch_tokens,
            epochs=optim.epochs,
            max_steps=optim.max_steps,
            seed=recipe.seed,
        )
        trained = [parameter for parameter in method.head.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self.model, self.optimizer = accelerator.prepare(method.head.train(), optimizer)
        self.weights_K = torch.tensor(method.weights, dtype=torch.float32, device=accelerator.device)
        self.step, self.masked_batches = 0, 0
        self.best: dict[str, Any] = {"step": 0, "replayed_tau": 0.0}
        self._losses: list[float] = []  # of the steps since the last validation
        self.latest: dict[str, Any] = {}
        self.run_id = uuid.uuid4().hex[:12]
        self._resume()
        self.started, self.first_step = time.monotonic(), self.step

    def _resume(self) -> None:
        accelerator, folder = self.accelerator, self.folder
        half_written, found = folder.half_written(), folder.latest(self.accelerator.num_processes)
        if found:
            path, state = found
            folder.load(accelerator, path)
            self.step, self.masked_batches, self.best = state["step"], state["masked_batches"], state["best"]
            self.latest, self.run_id = state["latest"], state["run_id"]
        else:
            torch.manual_seed(self.recipe.seed + accelerator.process_index)
        if accelerator.is_main_process:
            folder.out.mkdir(parents=True, exist_ok=True)
        self.log = RunLog(
            folder.out,
            self.recipe.log,
            folder.identity["recipe"],
            run_id=self.run_id,
            start=self.step,
            total=len(self.windows),
            main=accelerator.is_main_process,
        )
        if half_written:
            self.log.say(f"ignored half-written checkpoints: {', '.join(half_written)}")
        trained = sum(parameter.numel() for parameter in self.method.head.parameters() if parameter.requires_grad)
        self.log.say(
            f"{'going on from step ' + str(self.step) if found else 'training'}: {len(self.windows)} steps, "
            f"{trained / 1e6:.1f} M trained parameters, {accelerator.num_processes} process(es) on {accelerator.device.type}, "
            f"{accelerator.distributed_type.value}, precision {accelerator.mixed_precision}"
        )

    def _forward(self, batch: dict[str, Tensor]) -> Any:
        on_device = {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        return self.model(**on_device, **self.method.constants())

    def _batches(self, parts: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        """A batch of each part; all rows are read at once, as an online target computes them together."""
        stored = iter(read(self.store, [row for part in parts for row in part]))
        return [self.method.batch(list(itertools.islice(stored, len(part)))) for part in parts]

    def train_step(self, window: Window) -> None:
        """One optimizer step over the window's conversations, all processes together."""
        begun = time.monotonic()
        accelerator, optim = self.accelerator, self.recipe.optim
        processes, rank = accelerator.num_processes, accelerator.process_index
        parts = shares(window.rows, self.store.lengths, processes * optim.accumulation)[rank::processes]
        batches = self._batches(parts)
        # Known before the first backward: how many rows each head's loss sums over, everywhere in this window.
        counts_BK = torch.stack([self.method.counts(batch) for batch in batches]).to(accelerator.device)
        masked = (counts_BK.sum(1) == 0).sum().view(1)
        *counts, masked_count = accelerator.reduce(torch.cat([counts_BK.sum(0), masked]), "sum").tolist()
        scale_K = self.weights_K / torch.tensor(counts, device=accelerator.device).clamp(min=1)
        self.masked_batches += masked_count
        rate = learning_rate(window.step, len(self.windows), optim.lr, optim.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals = Totals(len(self.weights_K), accelerator.device)
        for part, batch in zip(parts, batches, strict=True):
            with accelerator.accumulate(self.model):
                output = self._forward(batch)
                totals.add(output)
                loss = (output.numerators_K * scale_K).sum()
                self._guard(loss, window, part)
                # accelerate and DeepSpeed divide by the accumulation steps and average over processes; counts already did both.
                accelerator.backward(loss * (optim.accumulation * processes))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), optim.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self._guard(torch.as_tensor(norm, device=accelerator.device), window, [])
        self.step = window.step
        self._log_step(window, totals, rate, float(norm), time.monotonic() - begun)

    def _log_step(self, window: Window, totals: Totals, rate: float, norm: float, seconds: float) -> None:
        figures = self._reduced(totals)
        self._losses.append(figures["loss"])
        tokens = sum(self.store.lengths[row] for row in window.rows)
        per_step = (time.monotonic() - self.started) / (self.step - self.first_step)
        row = {
            "step": window.step,
            "epoch": window.epoch,
            **figures,
            "lr": rate,
            "grad_norm": norm,
            "conversations": len(window.rows),
            "tokens": tokens,
            "masked_batches": self.masked_batches,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
        }
        self.log.step(row, per_step * (len(self.windows) - self.step))

    def _reduced(self, totals: Totals) -> dict[str, Any]:
        totals.tensor().copy_(self.accelerator.reduce(totals.tensor(), "sum"))
        return totals.figures(self.method.weights)

    def _guard(self, value: Tensor, window: Window, rows: Sequence[int]) -> None:
        """Stop every process when a loss or a gradient norm is not finite in one, before it reaches the weights."""
        if not self.accelerator.reduce((~torch.isfinite(value.detach())).float().view(1), "sum").any():
            return
        ids = ", ".join(self.store.conversation_ids[row] for row in (rows or window.rows)[:5])
        raise HeadwayError(
            f"{self.store.folder}: loss or gradient not finite at step {window.step} (conversations {ids}, ...); the last "
            f"checkpoint in {self.folder.checkpoints} is good; lower optim.lr, or collect these conversations again"
        )

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, accuracies, simulated and replayed tau on the held-out conversations, and the training loss since the last time.

        Every process makes the same number of passes.
        """
        accelerator = self.accelerator
        size = max(1, self.recipe.optim.batch_tokens // self.recipe.optim.accumulation)
        chunks = in_chunks(self.validation_rows, self.store.lengths, size)
        self.model.eval()
        totals = Totals(len(self.weights_K), accelerator.device)
        for chunk in chunks:
            part = shares(chunk, self.store.lengths, accelerator.num_processes)[accelerator.process_index]
            totals.add(self._forward(*self._batches([part])))
        replayed = self._replay()
        self.model.train()
        training_loss = sum(self._losses) / max(1, len(self._losses))
        return {"step": self.step, "training_loss": training_loss, **self._reduced(totals), **replayed.figures()}

    def _replay(self) -> Replayed:
        accelerator = self.accelerator
        head = whole_head(accelerator, self.method.head)
        rows = shares(self.validation_rows, self.store.lengths, accelerator.num_processes)[accelerator.process_index]
        with accelerator.autocast():
            return gathered(accelerator, self.method.replay(head, read(self.store, rows)))

    def checkpoint(self) -> None:
        """Validate, keep the head if it is the best so far, save what a continuation needs."""
        accelerator = self.accelerator
        self.latest = self.validate()
        self._losses.clear()
        self.log.validation(self.latest)
        if self.latest["replayed_tau"] > self.best["replayed_tau"]:
            self.best = self.latest
            state = accelerator.get_state_dict(self.model)
            if accelerator.is_main_process:
                save_head(self.method.head, self.folder.best(self.step), {"validation": self.best}, state)
        state = {
            "step": self.step,
            "masked_batches": self.masked_batches,
            "best": self.best,
            "latest": self.latest,
            "run_id": self.run_id,
        }
        self.folder.save(accelerator, state, self.recipe.save.keep_last)

    def finish(self) -> None:
        """The best head becomes the result."""
        best, latest = self.best, self.latest
        if turned_over(best, latest):
            self.log.say(
                f"validation turned over: replayed tau {best['replayed_tau']:.3f} at step {best['step']}, "
                f"{latest['replayed_tau']:.3f} at the end, while the training loss fell from {best['training_loss']:.3f} to "
                f"{latest['training_loss']:.3f}; the head of step {best['step']} is the result"
            )
        manifest = {
            **self.method.facts(),
            "seed": self.recipe.seed,
            "processes": self.accelerator.num_processes,
            "precision": self.accelerator.mixed_precision,
            "steps": len(self.windows),
            "masked_batches": self.masked_batches,
            "best": best,
            "latest": latest,
            "turned_over": turned_over(best, latest),
        }
        if self.accelerator.is_main_process:
            manifest["confirmed"] = self._confirmed()
            self.folder.finish(self.best["step"], manifest)
        self.accelerator.wait_for_everyone()
        if self.masked_batches:
            self.log.say(f"{self.masked_batches} batches had no supervised row and ran with zero weight")
        self.log.say(f"finished: {self.folder.out} (replayed tau {best['replayed_tau']:.3f} on held-out conversations)")

    def _confirmed(self) -> dict[str, Any] | None:
        """The best head's tau in real decoding, where the recipe asks for it."""
        count = prompts_to_confirm(self.recipe.save.confirm, self.recipe.target)
        if not count:
            return None
        folder, steps = self.folder.best(self.best["step"]), len(self.method.weights)
        try:
            made = confirm(folder, self.recipe.target, self.store, self.validation_rows, count, steps)
        except HeadwayError as error:  # a target that cannot be decoded here is no reason to lose the head
            self.log.say(f"not confirmed by decoding: {error}")
            return {"error": str(error)}
        self.log.say(
            f"decoding {made['prompts']} held-out prompts: tau {made['tau']:.3f}, replayed {made['replayed_tau']:.3f}; "
            f"{made['texts_identical']} of the texts are the stored ones"
        )
        return made
