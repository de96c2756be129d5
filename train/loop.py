"""The one training loop, on accelerate: any head that returns loss numerators and counts from one forward call.

The loss of a step is sum_k weight_k * (sum over rows of head k's loss) / (number of such rows), both taken over ALL processes and
accumulation steps, so it depends on neither padding, batch split nor world size. Shapes: K heads (or steps).
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor
from transformers.integrations import unset_hf_deepspeed_config

from data_prep.store import FeatureStore, StoredConversation
from eval.replay import Replayed
from heads.checkpoint import Head, save_head
from heads.errors import HeadwayError
from heads.target import auto_device, auto_dtype
from train.figures import Totals
from train.logs import RunLog
from train.recipe import Recipe
from train.sampler import Window, in_chunks, plan, shares
from train.scoring import confirm, gathered, prompts_to_confirm, turned_over, whole_head
from train.state import RunFolder


class Method(Protocol):
    """What a trainer brings: a head and how stored conversations become its batches."""

    @property
    def head(self) -> Head:
        """The head to train."""

    @property
    def weights(self) -> tuple[float, ...]:
        """[K]: of the heads' losses."""

    def batch(self, conversations: Sequence[StoredConversation]) -> dict[str, Tensor]:
        """Keyword arguments of the head's forward, on the CPU."""

    def counts(self, batch: dict[str, Tensor]) -> Tensor:
        """[K] int64: the rows each head's loss will sum over, known without the head."""

    def constants(self) -> dict[str, Any]:
        """Further keyword arguments of the head's forward, the same for every batch (a teacher)."""

    def replay(self, head: Head, conversations: Sequence[StoredConversation]) -> Replayed:
        """What decoding with `head`, this method's own or a copy of it, would accept of these texts."""

    def facts(self) -> dict[str, Any]:
        """What belongs into the manifest beside the loop's own entries."""


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The accelerator of a run. Called first: it is what tells the processes of a launch from each other.

    Raises HeadwayError when `accelerate launch --cpu` was told to start several: it starts one and says nothing.
    """
    without_gpu = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    # Unless the backend is named, every process believes it is alone while DeepSpeed shards over all.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if without_gpu and deepspeed else []
    precision = recipe.precision
    if precision == "auto":
        precision = "bf16" if auto_dtype("auto", auto_device("auto")) == torch.bfloat16 else "fp32"
    accelerator = Accelerator(
        gradient_accumulation_steps=recipe.optim.accumulation,
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=without_gpu and not deepspeed,
        kwargs_handlers=handlers,
    )
    if "MASTER_ADDR" in os.environ and accelerator.num_processes == 1 and "LOCAL_RANK" not in os.environ:
        raise HeadwayError(
            "accelerate launch --cpu: starts one process whatever --num_processes says; give --multi_gpu instead"
        )
    if plugin := accelerator.state.deepspeed_plugin:
        # The recipe is the one source of these; DeepSpeed asks for a micro batch size that nothing here depends on.
        plugin.deepspeed_config["gradient_accumulation_steps"] = recipe.optim.accumulation
        plugin.deepspeed_config["gradient_clipping"] = recipe.optim.clip
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        # Or transformers would shard the frozen target under ZeRO-3 as if it were trained; it stays outside the engine.
        unset_hf_deepspeed_config()
    set_seed(recipe.seed)
    return accelerator


def split_rows(store: FeatureStore, held_out: int) -> tuple[list[int], list[int]]:
    """(training, validation) rows of the store: validation are the `held_out` conversations with the smallest SHA-256
    of their ids, whatever else is there."""
    conversations = store.conversations_by_hash()
    if held_out >= len(conversations):
        raise HeadwayError(
            f"recipe: data.held_out is {held_out}, and {store.folder} holds {len(conversations)} conversations; "
            "hold out fewer"
        )
    validation = {row for rows in conversations[:held_out] for row in rows}
    return [row for row in range(len(store)) if row not in validation], sorted(validation)


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
        _require_served(method, store, training, "training")
        _require_served(method, store, self.validation_rows, "validation")
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

    def _batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        return self.method.batch([self.store[row] for row in rows])

    def train_step(self, window: Window) -> None:
        """One optimizer step over the window's conversations, all processes together."""
        begun = time.monotonic()
        accelerator, optim = self.accelerator, self.recipe.optim
        processes, rank = accelerator.num_processes, accelerator.process_index
        parts = shares(window.rows, self.store.lengths, processes * optim.accumulation)[rank::processes]
        batches = [self._batch(part) for part in parts]
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
            totals.add(self._forward(self._batch(part)))
        replayed = self._replay()
        self.model.train()
        training_loss = sum(self._losses) / max(1, len(self._losses))
        return {"step": self.step, "training_loss": training_loss, **self._reduced(totals), **replayed.figures()}

    def _replay(self) -> Replayed:
        accelerator = self.accelerator
        head = whole_head(accelerator, self.method.head)
        rows = shares(self.validation_rows, self.store.lengths, accelerator.num_processes)[accelerator.process_index]
        with accelerator.autocast():
            return gathered(accelerator, self.method.replay(head, [self.store[row] for row in rows]))

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


def _require_served(method: Method, store: FeatureStore, rows: Sequence[int], kind: str) -> None:
    if any(method.counts(method.batch([store[row]])).any() for row in rows):
        return
    ids = ", ".join(store.conversation_ids[row] for row in rows[:5])
    raise HeadwayError(
        f"{store.folder}: none of the {len(rows)} {kind} conversations ({ids}, ...) has an assistant turn of two tokens or more; "
        "collect conversations with answers, and look at the loss mask"
    )
