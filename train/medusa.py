"""Train Medusa heads on a feature store (methods.md, section 3: Medusa-1, the target frozen).

    python train/medusa.py                                  the demo's recipe
    accelerate launch train/medusa.py --config configs/recipes/X.yaml --optim.lr 1e-3

Run again after an interruption, it goes on where it was. Shapes: K heads, P packed rows, C rows of a chunk, H hidden, V vocabulary,
D draft vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from data_prep.store import MANIFEST, FeatureStore, StoredConversation, read_manifest
from heads.divergences import check_losses, needs_teacher
from heads.errors import HeadwayError, run_script, sha256_file
from heads.losses import Output
from heads.medusa import MedusaConfig, MedusaHead, pack
from heads.served import draft_labels, served_labels
from heads.target import TargetEnds, fingerprint, resolve
from heads.vocabulary import choose_vocabulary
from train.loop import make_accelerator, split_rows, train
from train.recipe import Recipe, as_json, read_recipe, require
from train.state import RunFolder

DEFAULT_RECIPE = Path(__file__).resolve().parents[1] / "configs" / "recipes" / "demo.yaml"
VERSIONS = ("headway", "torch", "transformers", "accelerate", "deepspeed")


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
        require("head.num_heads", head.num_heads, head.num_heads >= 1, "at least 1")
        require("head.num_layers", head.num_layers, head.num_layers >= 1, "at least 1")
        require("head.decay", head.decay, 0 < head.decay <= 1, "above 0 and at most 1, such as 0.8")
        check_losses(head.losses)
        size = head.draft_vocab_size
        require("head.draft_vocab_size", size, size is None or size >= 1, "at least 1, or null for the full vocabulary")


class MedusaMethod:
    """Medusa-1 for the training loop."""

    def __init__(self, recipe: MedusaRecipe, store: FeatureStore, ends: TargetEnds) -> None:
        settings = recipe.head
        counts_V, held_out_V = _supervised_counts(store, recipe.data.held_out)
        vocabulary = choose_vocabulary(counts_V, settings.draft_vocab_size, _special_ids(ends.tokenizer))
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
        self.coverage = {"training": vocabulary.coverage(counts_V), "held_out": vocabulary.coverage(held_out_V)}
        self.vocabulary_size = vocabulary.size
        self._draft_ids_V = self.head.draft_ids_of()
        self._constants: dict[str, Any] = {"losses": settings.losses}
        if settings.hydra:
            self._constants["embed"] = ends.embed
        if needs_teacher(settings.losses):
            self._constants["teacher"] = restricted_teacher(ends, vocabulary.ids_D, store[0].last_TH[:64])

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

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "head",
            "made_by": "train/medusa.py",
            "versions": _versions(),
            "draft_vocabulary": {"size": self.vocabulary_size, "coverage": self.coverage},
        }


def _supervised_counts(store: FeatureStore, held_out: int) -> tuple[Tensor, Tensor]:
    """([V], [V]): how often each token is supervised in the training and in the held-out conversations."""
    held_out_V = torch.zeros_like(store.supervised_counts())
    for row in split_rows(store, held_out)[1]:
        stored = store[row]
        held_out_V += torch.bincount(stored.ids_T[stored.turn_T > 0], minlength=len(held_out_V))
    return store.supervised_counts() - held_out_V, held_out_V


def _special_ids(tokenizer: Any) -> set[int]:
    """All special tokens, the reserved ones included."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def restricted_teacher(ends: TargetEnds, ids_D: Tensor, probe_CH: Tensor) -> Output:
    """The target's output function over the draft vocabulary, [C, H] -> [C, D].

    Where that function is the plain product with lm_head, which is found out on the real states `probe_CH`, only the rows of the
    draft vocabulary are multiplied; with a soft cap, scale or bias the whole function runs and its columns are taken.
    """
    weight_VH = ends.lm_head_weight
    ids_D, weight_DH = ids_D.to(weight_VH.device), weight_VH[ids_D.to(weight_VH.device)]

    def whole(last_CH: Tensor) -> Tensor:
        return ends.logits(last_CH.to(weight_VH.device, weight_VH.dtype))[..., ids_D]

    def plain(last_CH: Tensor) -> Tensor:
        return last_CH.to(weight_DH.dtype) @ weight_DH.T

    expected = whole(probe_CH).float()
    error = (plain(probe_CH.to(weight_VH.device)).float() - expected).abs().max()
    return plain if error <= 1e-2 * expected.abs().max() else whole


def main() -> None:
    recipe = read_recipe(MedusaRecipe, DEFAULT_RECIPE, sys.argv[1:])
    accelerator = make_accelerator(recipe)
    store_folder = Path(recipe.data.features)
    features = read_manifest(store_folder)
    made_for, target = features["target"], {"name": recipe.target, "fingerprint": fingerprint(resolve(recipe.target))}
    if made_for["fingerprint"] != target["fingerprint"]:
        raise HeadwayError(
            f"{store_folder}: collected from target {made_for['name']} ({made_for['fingerprint'][:12]}), the recipe's is "
            f"{target['name']} ({target['fingerprint'][:12]}); collect again, or name the target that was used"
        )
    identity = {
        "recipe": as_json(recipe),
        "target": target,
        "features": {"manifest_sha256": sha256_file(store_folder / MANIFEST), **features["totals"]},
    }
    folder = RunFolder(recipe.out, identity)
    if folder.finished:
        best = folder.finished["best"]
        accelerator.print(f"{recipe.out}: already finished (simulated tau {best['tau']:.3f}); nothing to do")
        return
    store = FeatureStore.open(store_folder, checksums=accelerator.is_main_process)
    ends = TargetEnds.load(recipe.target, device=str(accelerator.device))
    method = MedusaMethod(recipe, store, ends)
    coverage = " ".join(f"{kind} {share:.2%}" for kind, share in method.coverage.items())
    accelerator.print(
        f"{len(store)} conversations, {store.tokens:,} tokens, {store.supervised_tokens / store.tokens:.1%} supervised; "
        f"draft vocabulary {method.vocabulary_size:,} of {ends.vocab_size:,}, coverage: {coverage}"
    )
    train(method, recipe, store, folder, accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
