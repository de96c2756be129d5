"""Optimizer steps and validations of any head that returns loss numerators and counts from one forward call; writes nothing.

The loss of a step is sum_k weight_k * (sum over rows of head k's loss) / (number of such rows), both taken over ALL processes and
accumulation steps, so it depends on neither padding, batch split nor world size. Shapes: K heads (or steps), B batches, P processes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from data_prep.store import FeatureStore
from eval.replay import Replayed
from heads.errors import HeadwayError
from train.figures import Totals
from train.guard import LossGuard
from train.method import Method
from train.online import read
from train.recipe import Optim, Recipe
from train.sampler import Window, in_chunks, shares
from train.scoring import gathered, whole_head


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Of step 1..total: a linear rise over the first `warmup` share, then half a cosine towards 0."""
    rising = round(warmup * total)
    if step <= rising:
        return peak * step / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising - 1) / max(1, total - rising)))


def make_optimizer(optim: Optim, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trained parameters."""
    if optim.name == "sgd":
        return torch.optim.SGD(parameters, lr=optim.lr, weight_decay=optim.weight_decay)
    return torch.optim.AdamW(parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True)


class Steps:
    """The steps of `windows`, a plan of train/sampler.py, with all processes together.

    Attributes: model and optimizer as accelerate prepared them; trained and parameters, their numbers; step, the last one done;
    masked_batches, those so far that held conversations and no supervised row.
    """

    def __init__(
        self,
        method: Method,
        recipe: Recipe,
        store: FeatureStore,
        accelerator: Accelerator,
        windows: Sequence[Window],
        validation_rows: Sequence[int],
    ) -> None:
        self.method, self.recipe, self.store, self.accelerator = method, recipe, store, accelerator
        self.windows, self.validation_rows = windows, validation_rows
        trained = [parameter for parameter in method.head.parameters() if parameter.requires_grad]
        # Counted now: ZeRO-3 leaves nothing to count afterwards.
        self.trained = sum(parameter.numel() for parameter in trained)
        self.parameters = sum(parameter.numel() for parameter in method.head.parameters())
        optimizer = make_optimizer(recipe.optim, trained)
        self.model, self.optimizer = accelerator.prepare(method.head.train(), optimizer)
        self.weights_K = torch.tensor(method.weights, dtype=torch.float32, device=accelerator.device)
        self.step, self.masked_batches = 0, 0
        self.guard = LossGuard(recipe.optim.spike)
        self._losses: list[float] = []  # of the steps since the last validation

    def memory(self) -> dict[str, Any]:
        """What a continuation needs beside weights, optimizer and random state; JSON."""
        return {"step": self.step, "masked_batches": self.masked_batches, "recent_losses": self.guard.recent}

    def recall(self, memory: dict[str, Any]) -> None:
        """Put the values of `memory()` back."""
        self.step, self.masked_batches = memory["step"], memory["masked_batches"]
        self.guard = LossGuard(self.recipe.optim.spike, memory["recent_losses"])

    def _forward(self, batch: dict[str, Tensor]) -> Any:
        on_device = {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        return self.model(**on_device, **self.method.constants())

    def batches(self, parts: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        """A batch of each part; all rows are read at once, as an online target computes them together."""
        stored = iter(read(self.store, [row for part in parts for row in part]))
        return [self.method.batch(list(itertools.islice(stored, len(part)))) for part in parts]

    def train_step(self, window: Window) -> dict[str, Any]:
        """One optimizer step over the window's conversations; its figures.

        Raises HeadwayError, before the backward, for a loss that is not finite or a spike, naming the batch's conversations;
        and for a gradient that is not finite.
        """
        begun = time.monotonic()
        accelerator, optim = self.accelerator, self.recipe.optim
        processes, rank = accelerator.num_processes, accelerator.process_index
        parts = shares(window.rows, self.store.lengths, processes * optim.accumulation)
        mine = parts[rank::processes]
        batches = self.batches(mine)
        scale_K = self._scale(mine, batches)
        rate = learning_rate(window.step, len(self.windows), optim.lr, optim.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals = Totals(len(self.weights_K), accelerator.device)
        for number, batch in enumerate(batches):
            with accelerator.accumulate(self.model):
                output = self._forward(batch)
                totals.add(output)
                loss = (output.numerators_K * scale_K).sum()
                self._refuse_fault(loss, window, parts[number * processes : (number + 1) * processes])
                # accelerate and DeepSpeed divide by the accumulation steps and average over processes; counts already did both.
                accelerator.backward(loss * (optim.accumulation * processes))
                if accelerator.sync_gradients:
                    norm = float(accelerator.clip_grad_norm_(self.model.parameters(), optim.clip))
                    self._refuse_norm(norm, window)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.step = window.step
        figures = self._reduced(totals)
        self.guard.done(any(figures["rows_in_draft_vocabulary"]))
        self._losses.append(figures["loss"])
        tokens, seconds = sum(self.store.lengths[row] for row in window.rows), time.monotonic() - begun
        return {
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

    def _scale(self, parts: Sequence[Sequence[int]], batches: Sequence[dict[str, Tensor]]) -> Tensor:
        """[K]: each head's weight over the rows that its loss sums over, everywhere in this window; known before any backward.

        A batch without such a row runs like the others, with nothing to add: a process that left it out would leave the others
        waiting. Where it holds conversations it is counted.
        """
        counts_BK = torch.stack([self.method.counts(batch) for batch in batches]).to(self.accelerator.device)
        held_B = torch.tensor([bool(part) for part in parts], device=counts_BK.device)
        masked = (held_B & (counts_BK.sum(1) == 0)).sum().view(1)
        *counts, masked_count = self.accelerator.reduce(torch.cat([counts_BK.sum(0), masked]), "sum").tolist()
        self.masked_batches += masked_count
        return self.weights_K / torch.tensor(counts, device=self.accelerator.device).clamp(min=1)

    def _refuse_fault(self, loss: Tensor, window: Window, parts_P: Sequence[Sequence[int]]) -> None:
        losses_P = self.accelerator.gather(loss.detach().float().view(1)).tolist()
        if fault := self.guard.fault(losses_P):
            process, what = fault
            self._stop(f"{what} at step {window.step}", parts_P[process])

    def _refuse_norm(self, norm: float, window: Window) -> None:
        if not math.isfinite(norm):
            self._stop(f"the gradient's norm is {norm} at step {window.step}", window.rows)

    def _stop(self, what: str, rows: Sequence[int]) -> None:
        """In every process alike, so that none waits for another."""
        ids = ", ".join(self.store.conversation_ids[row] for row in rows)
        raise HeadwayError(
            f"{self.store.folder}: {what}, in the batch of the conversations {ids}; it was not trained on, and the last "
            "checkpoint is from before it; look at these conversations, collect them again, lower optim.lr, or raise optim.spike"
        )

    def _reduced(self, totals: Totals) -> dict[str, Any]:
        totals.tensor().copy_(self.accelerator.reduce(totals.tensor(), "sum"))
        return totals.figures(self.method.weights)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, accuracies, simulated and replayed tau on the held-out conversations, and the training loss since the last time.

        `replayed_tau_error` is the standard error of the replayed tau over its rounds. Every process makes the same number of
        passes.
        """
        accelerator = self.accelerator
        size = max(1, self.recipe.optim.batch_tokens // self.recipe.optim.accumulation)
        self.model.eval()
        totals = Totals(len(self.weights_K), accelerator.device)
        for chunk in in_chunks(self.validation_rows, self.store.lengths, size):
            part = shares(chunk, self.store.lengths, accelerator.num_processes)[accelerator.process_index]
            totals.add(self._forward(*self.batches([part])))
        replayed = self._replay()
        self.model.train()
        training_loss = sum(self._losses) / max(1, len(self._losses))
        self._losses.clear()
        emitted = [row.emitted for row in replayed.ledger.rounds]
        error = statistics.stdev(emitted) / math.sqrt(len(emitted)) if len(emitted) > 1 else 0.0
        return {
            "step": self.step,
            "training_loss": training_loss,
            **self._reduced(totals),
            **replayed.figures(),
            "replayed_tau_error": error,
        }

    def _replay(self) -> Replayed:
        accelerator = self.accelerator
        head = whole_head(accelerator, self.method.head)
        rows = shares(self.validation_rows, self.store.lengths, accelerator.num_processes)[accelerator.process_index]
        with accelerator.autocast():
            return gathered(accelerator, self.method.replay(head, read(self.store, rows)))
