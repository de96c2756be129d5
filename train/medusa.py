"""Train Medusa heads on a feature store (methods.md, section 3: Medusa-1, the target frozen).

    python train/medusa.py                                  the demo's recipe
    accelerate launch train/medusa.py --config configs/recipes/X.yaml --optim.lr 1e-3

Run again after an interruption, it goes on where it was. Shapes: K heads, P packed rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from data_prep.store import FeatureStore, StoredConversation
from eval.replay import Replayed, replay
from heads.checkpoint import Head
from heads.divergences import check_losses, needs_teacher
from heads.errors import run_script
from heads.medusa import MedusaConfig, MedusaHead, pack
from heads.served import draft_labels, served_labels
from heads.target import TargetEnds
from heads.vocabulary import choose_vocabulary
from train.prepare import coverage, facts, restricted_output, run_recipe, special_ids, supervised_counts
from train.recipe import Recipe, read_recipe, require, require_head

DEFAULT_RECIPE = Path(__file__).resolve().parents[1] / "configs" / "recipes" / "demo.yaml"


@dataclass
class Heads:
    """The Medusa heads.

    Args:
        num_heads: tokens drafted after the target's own.
        num_layers: residual layers of each head.
        output: own = each head has its own output matrix; shared = one for all heads.
        train_output: whether output matrices are trained; null = own ones are, a shared one is not.
        draft_vocab_size: the most frequent answer tokens that can be drafted; null = all.
        hydra: head k also sees the embeddings of the root and of the drafts before its own.
        decay: weight of head k's loss is decay^k.
        losses: name and weight of what the heads learn from: ce (the text), kl and others (the target's law).
    """

    num_heads: int = 4
    num_layers: int = 1
    output: Literal["own", "shared"] = "own"
    train_output: bool | None = None
    draft_vocab_size: int | None = 8192
    hydra: bool = False
    decay: float = 0.8
    losses: dict[str, float] = field(default_factory=lambda: {"ce": 1.0})


@dataclass
class MedusaRecipe(Recipe):
    """Train Medusa heads on a feature store."""

    head: Heads = field(default_factory=Heads)

    def check(self) -> None:
        super().check()
        head = self.head
        require_head(head.num_layers, head.decay, head.draft_vocab_size)
        require("head.num_heads", head.num_heads, head.num_heads >= 1, "at least 1")
        check_losses(head.losses)


class MedusaMethod:
    """Medusa-1 for the training loop."""

    parent = None

    def __init__(self, recipe: MedusaRecipe, store: FeatureStore, ends: TargetEnds) -> None:
        settings = recipe.head
        counts = supervised_counts(store, recipe.data.held_out)
        vocabulary = choose_vocabulary(counts["training"], settings.draft_vocab_size, special_ids(ends.tokenizer))
        config = MedusaConfig(
            hidden_size=ends.hidden_size,
            vocab_size=ends.vocab_size,
            draft_vocab_size=None if vocabulary.full else vocabulary.size,
            num_heads=settings.num_heads,
            num_layers=settings.num_layers,
            output=settings.output,
            hydra=settings.hydra,
        )
        self.head = MedusaHead.from_target(config, ends.lm_head_weight, vocabulary)
        if settings.train_output is not None:
            self.head.lm_head.weight.requires_grad_(settings.train_output)
        self.weights = tuple(settings.decay**k for k in range(settings.num_heads))
        self.vocabulary_size, self.coverage = vocabulary.size, coverage(vocabulary, counts)
        self._draft_ids_V = self.head.draft_ids_of()
        self._constants: dict[str, Any] = {"losses": settings.losses}
        if settings.hydra:
            self._constants["embed"] = ends.embed
        self._ends, self._law = ends, restricted_output(ends, vocabulary.ids_D, store[0].last_TH[:64])
        if needs_teacher(settings.losses):
            self._constants["teacher"] = self._law

    def batch(self, conversations: Sequence[StoredConversation]) -> dict[str, Tensor]:
        """Packed rows (heads.medusa.pack) of all conversations; segments numbered on, so that none touches another."""
        nothing = torch.empty(0, dtype=torch.int64)
        lasts, nexts, segments, start = [], [nothing], [nothing], 0
        for stored in conversations:
            last_PH, next_P, segment_P = pack(stored.last_TH, stored.ids_T, stored.turn_T)
            lasts.append(last_PH)
            nexts.append(next_P)
            segments.append(segment_P + start)
            start += len(segment_P)
        last_PH = torch.cat(lasts) if lasts else torch.empty(0, self.head.config.hidden_size)
        return {"last_PH": last_PH, "next_P": torch.cat(nexts), "segment_P": torch.cat(segments)}

    def counts(self, batch: dict[str, Tensor]) -> Tensor:
        labels_PK = served_labels(batch["next_P"], batch["segment_P"], self.head.config.num_heads)
        return (draft_labels(labels_PK, self._draft_ids_V) >= 0).sum(0)

    def constants(self) -> dict[str, Any]:
        return self._constants

    def replay(self, head: Head, conversations: Sequence[StoredConversation]) -> Replayed:
        return replay(head, self._ends, conversations, law=self._law)

    def facts(self) -> dict[str, Any]:
        return facts("train/medusa.py", self)


def main() -> None:
    run_recipe(read_recipe(MedusaRecipe, DEFAULT_RECIPE, sys.argv[1:]), MedusaMethod)


if __name__ == "__main__":
    run_script(main)
