"""What a head's drafts are worth on the probe's texts, and whether a changed head's are worth more.

Shapes: R places where a round may start, S steps, K heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from data_prep.store import StoredConversation
from eval.metrics import acceptance, mean_accepted_length
from eval.replay import Replayed, chain, text_ranks, walk
from eval.replay_steps import steps_over
from heads.checkpoint import Head
from heads.medusa import MedusaHead
from heads.target import TargetEnds

HALF_MAX = torch.finfo(torch.float16).max
GAIN, SURE = 1.1, 4.0
"""A changed head is another matter when it drafts this much deeper, by so many standard errors of the paired difference."""


@dataclass(frozen=True)
class Acceptance:
    """`tau`: emitted tokens a round, with its 95 % interval; `by_step`: share accepted of the drafts that were reached.

    `depth_R`: drafts accepted from each place, in the same order for every head over the same texts.
    """

    tau: float
    interval: tuple[float, float] | None
    by_step: list[float | None]
    depth_R: Tensor


@torch.no_grad()
def accepted(head: Head, ends: TargetEnds, texts: Sequence[StoredConversation], steps: int) -> Acceptance:
    """Replay the texts with chains of `steps`."""
    parts, depths = [], []
    for text in texts:
        ranks = text_ranks(head, ends, text, steps, candidates=1)
        parts.append(Replayed(walk([ranks], chain(steps)), [0.0] * steps, [0] * steps))
        depths.append((ranks.ranks_PS == 0).cumprod(1).sum(1))
    ledger = Replayed.joined(parts).ledger
    tau = mean_accepted_length(ledger)
    return Acceptance(tau.micro or 1.0, tau.ci95, acceptance(ledger).conditional, torch.cat(depths).double())


def better(changed: Acceptance, before: Acceptance) -> bool:
    """Whether a changed head drafts so much deeper that chance and texts do not explain it."""
    difference_R = changed.depth_R - before.depth_R
    error = difference_R.std() / len(difference_R) ** 0.5
    gain = difference_R.mean()
    return bool(gain > SURE * error and changed.depth_R.mean() > GAIN * before.depth_R.mean() + 0.05)


@torch.no_grad()
def hits_by_head(head: MedusaHead, ends: TargetEnds, texts: Sequence[StoredConversation]) -> Tensor:
    """[K, K]: how often head k's first choice is the token of head j's place. In a sound head the diagonal stands out."""
    heads = head.config.num_heads
    hits_KK, places = torch.zeros(heads, heads), 0
    for text in texts:
        rows, made = steps_over(head, ends, text, heads)
        all_R = (rows.labels_PS[:, -1] >= 0).nonzero()[:, 0]
        if not len(all_R):
            continue
        places += len(all_R)
        for k in range(heads):
            chosen_R = made.logits(k, all_R).argmax(-1)
            hits_KK[k] += (chosen_R[:, None] == rows.draft_PS[all_R]).sum(0).cpu()
    return hits_KK / max(1, places)


@torch.no_grad()
def largest_value(head: Head, ends: TargetEnds, text: StoredConversation, steps: int) -> tuple[float, str]:
    """The largest absolute value that goes into or out of a module of the head over a text, and that module's name."""
    largest, where = 0.0, ""

    def look(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            nonlocal largest, where
            for value in (*inputs, output):
                if isinstance(value, Tensor) and value.numel() and float(value.abs().max()) > largest:
                    largest, where = float(value.abs().max()), name

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in head.named_modules() if name]
    try:
        text_ranks(head, ends, text, steps)
    finally:
        for handle in handles:
            handle.remove()
    return largest, where


def surely_more(one: Acceptance, other: Acceptance) -> bool:
    """Whether the first drafts deeper than the second, be it by little, and chance does not explain it."""
    difference_R = one.depth_R - other.depth_R
    return bool(difference_R.mean() > SURE * difference_R.std() / len(difference_R) ** 0.5)
