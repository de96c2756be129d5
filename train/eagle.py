"""Train an EAGLE head on a feature store (methods.md, section 4), the target frozen: EAGLE-3 and 3.1, or EAGLE-1.

    python train/eagle.py                                   the demo's recipe
    accelerate launch train/eagle.py --config configs/recipes/X.yaml --optim.lr 1e-3
    python train/eagle.py --config X.yaml --head.parent DIR --out NEW --data.features MORE     goes on from a trained head

Run again after an interruption, it goes on where it was. Shapes: X tokens of a batch, P packed rows (heads/served.py), S steps,
H hidden, F states of the target side by side, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig

from data_prep.store import FeatureStore, StoredConversation
from eval.replay import Replayed, replay
from heads import load_head
from heads.checkpoint import MANIFEST, Head
from heads.divergences import check_losses
from heads.draft_layer import layer_settings
from heads.eagle import Eagle1Config, Eagle1Head, EagleHead
from heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from heads.errors import HeadwayError, run_script, sha256_file
from heads.hub import resolve_head
from heads.served import draft_labels, served_labels, served_rows
from heads.target import TargetEnds, resolve
from heads.vocabulary import choose_vocabulary
from train.prepare import coverage, facts, restricted_output, run_recipe, special_ids, supervised_counts
from train.recipe import Recipe, read_recipe, require, require_head

DEFAULT_RECIPE = Path(__file__).resolve().parents[1] / "configs" / "recipes" / "demo-eagle3.yaml"


@dataclass
class Eagle:
    """The head.

    Args:
        kind: eagle3, or eagle for EAGLE-1.
        parent: folder or Hub id of a trained head to go on from; its draft vocabulary is kept, and the shape below must be its own.
        num_layers: decoder layers.
        draft_vocab_size: the most frequent answer tokens that can be drafted; null = all, as EAGLE-1 needs it.
        taps: layers of the target whose input is read; null = 2, N/2 and N-3 of N. EAGLE-1 reads the last state alone.
        fc_norm: EAGLE-3.1, each tap is normed before they are fused.
        norm_output: EAGLE-3.1, the state after the final norm is fed back.
        train_output: whether the output matrix is trained, or stays the target's own rows.
        steps: draft steps of the training-time test.
        decay: weight of step s's loss is decay^s.
        losses: name and weight of what the head learns from: kl, ce, reverse_kl, tv, js, lk, top_k; smooth_l1 for EAGLE-1.
        noise: largest uniform noise on the features (EAGLE-1: 0.1).
        start: a new head drafts what the target's output makes of the deepest state that it reads, or has random weights.
    """

    kind: Literal["eagle3", "eagle"] = "eagle3"
    parent: str | None = None
    num_layers: int = 1
    draft_vocab_size: int | None = 8192
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    train_output: bool = True
    steps: int = 4
    decay: float = 0.8
    losses: dict[str, float] = field(default_factory=lambda: {"kl": 1.0})
    noise: float = 0.0
    start: Literal["target", "random"] = "target"


@dataclass
class EagleRecipe(Recipe):
    """Train an EAGLE head on a feature store."""

    head: Eagle = field(default_factory=Eagle)

    def check(self) -> None:
        super().check()
        head = self.head
        require_head(head.num_layers, head.decay, head.draft_vocab_size)
        require("head.steps", head.steps, head.steps >= 1, "at least 1")
        require("head.noise", head.noise, 0 <= head.noise < float("inf"), "0 or above, such as 0.1")
        check_losses(head.losses, features=head.kind == "eagle")
        if head.kind == "eagle":
            none = "null: EAGLE-1 reads the target's last state and drafts with its output"
            require("head.draft_vocab_size", head.draft_vocab_size, head.draft_vocab_size is None, none)
            require("head.taps", head.taps, head.taps is None, none)

    def taps(self) -> tuple[int, ...]:
        if self.head.kind == "eagle":
            return ()
        return _taps(self.head, AutoConfig.from_pretrained(resolve(self.target)).get_text_config(), self.target)


class EagleMethod:
    """An EAGLE head for the training loop."""

    def __init__(self, recipe: EagleRecipe, store: FeatureStore, ends: TargetEnds) -> None:
        settings = recipe.head
        counts = supervised_counts(store, recipe.data.held_out)
        self.parent = settings.parent
        self.head = _parent(settings, ends) if settings.parent else _new_head(settings, ends, counts["training"])
        if missing := sorted(set(self.head.taps) - set(store.taps)):
            wanted = ",".join(map(str, self.head.taps))
            raise HeadwayError(
                f"{store.folder}: holds the taps {list(store.taps)}, and the head reads {list(self.head.taps)} ({missing} are "
                f"missing); collect with --taps {wanted} into a new folder"
            )
        if isinstance(self.head, Eagle3Head):
            self.head.lm_head.weight.requires_grad_(settings.train_output)
        self.weights = tuple(settings.decay**step for step in range(settings.steps))
        vocabulary = self.head.vocabulary()
        self.vocabulary_size, self.coverage = vocabulary.size, coverage(vocabulary, counts)
        self._draft_ids_V = self.head.draft_ids_of()
        self._settings, self._ends = settings, ends
        self._constants: dict[str, Any] = {
            "embed": ends.embed,
            "output": restricted_output(ends, vocabulary.ids_D, store[0].last_TH[:64]),
            "losses": settings.losses,
            "steps": settings.steps,
            "noise": settings.noise,
        }

    def batch(self, conversations: Sequence[StoredConversation]) -> dict[str, Tensor]:
        """The texts that are served somewhere, one behind the other; segments numbered on, so that none touches another."""
        nothing = torch.empty(0, dtype=torch.int64)
        hidden = self.head.config.hidden_size
        parts: dict[str, list[Tensor]] = {
            "ids_X": [nothing],
            "lengths_B": [nothing],
            "index_P": [nothing],
            "segment_P": [nothing],
            "states_XF": [torch.empty(0, hidden * max(1, len(self.head.taps)))],
            "last_PH": [torch.empty(0, hidden)],
        }
        begin = segments = 0
        for stored in conversations:
            index_P, segment_P = served_rows(stored.turn_T)
            if not len(index_P):
                continue
            states = [stored.taps[tap] for tap in self.head.taps] or [stored.last_TH]
            found = {
                "ids_X": stored.ids_T,
                "lengths_B": torch.tensor([len(stored.ids_T)]),
                "index_P": index_P + begin,
                "segment_P": segment_P + segments,
                "states_XF": torch.cat(states, 1),
                "last_PH": stored.last_TH[index_P],
            }
            for name, tensor in found.items():
                parts[name].append(tensor)
            begin, segments = begin + len(stored.ids_T), segments + len(index_P)
        return {name: torch.cat(tensors[1:] or tensors) for name, tensors in parts.items()}

    def counts(self, batch: dict[str, Tensor]) -> Tensor:
        labels_PS = served_labels(batch["ids_X"][batch["index_P"] + 1], batch["segment_P"], self._settings.steps)
        return (draft_labels(labels_PS, self._draft_ids_V) >= 0).sum(0)

    def constants(self) -> dict[str, Any]:
        return self._constants

    def replay(self, head: Head, conversations: Sequence[StoredConversation]) -> Replayed:
        return replay(head, self._ends, conversations, self._settings.steps, law=self._constants["output"])

    def facts(self) -> dict[str, Any]:
        made = facts("train/eagle.py", self)
        if self._settings.parent:
            made["parent"] = {"manifest_sha256": sha256_file(resolve_head(self._settings.parent) / MANIFEST)}
        return made


def head_shape(settings: Eagle, target_config: Any, target: str) -> dict[str, Any]:
    """The head's configuration for a target of this text config, but for the size of its draft vocabulary."""
    shape = layer_settings(target_config) | {"num_layers": settings.num_layers}
    if settings.kind == "eagle":
        return shape
    taps = _taps(settings, target_config, target)
    return shape | {"taps": taps, "fc_norm": settings.fc_norm, "norm_output": settings.norm_output}


def _shape(settings: Eagle, ends: TargetEnds) -> dict[str, Any]:
    return head_shape(settings, AutoConfig.from_pretrained(ends.path).get_text_config(), ends.name)


def _taps(settings: Eagle, config: Any, target: str) -> tuple[int, ...]:
    """The layers that an EAGLE-3 head reads. Raises HeadwayError for one that the target does not have."""
    layers = int(config.num_hidden_layers)
    taps = default_taps(layers) if settings.taps is None else tuple(settings.taps)
    if any(not 0 <= tap < layers for tap in taps):
        raise HeadwayError(f"recipe: head.taps is {list(taps)}; target '{target}' has layers 0 to {layers - 1}")
    return taps


def _new_head(settings: Eagle, ends: TargetEnds, counts_V: Tensor) -> EagleHead:
    shape = _shape(settings, ends)
    if settings.kind == "eagle":
        head: EagleHead = Eagle1Head(Eagle1Config(**shape))
    else:
        vocabulary = choose_vocabulary(counts_V, settings.draft_vocab_size, special_ids(ends.tokenizer))
        size = None if vocabulary.full else vocabulary.size
        head = Eagle3Head.from_target(Eagle3Config(**shape, draft_vocab_size=size), ends.lm_head_weight, vocabulary)
    if settings.start == "target":
        head.start_at_target(ends.final_scale)
    return head


def _parent(settings: Eagle, ends: TargetEnds) -> EagleHead:
    """The head to go on from. Raises HeadwayError where the recipe asks for another shape, naming the first that differs."""
    assert settings.parent is not None
    head = load_head(settings.parent, dtype=torch.float32)
    if not isinstance(head, EagleHead) or head.config.kind != settings.kind:
        raise HeadwayError(f"{settings.parent}: a head of kind '{head.config.kind}', head.kind is '{settings.kind}'")
    size = settings.draft_vocab_size
    wanted = _shape(settings, ends) | {"draft_vocab_size": None if size == ends.vocab_size else size}
    for key, value in wanted.items():
        own = getattr(head.config, key)
        if own != value:
            raise HeadwayError(
                f"{settings.parent}: its {key} is {own}, the recipe and the target ask for {value}; a head goes on in the shape "
                "it was trained in, with the draft vocabulary that it has"
            )
    return head


def main() -> None:
    run_recipe(read_recipe(EagleRecipe, DEFAULT_RECIPE, sys.argv[1:]), EagleMethod)


if __name__ == "__main__":
    run_script(main)
