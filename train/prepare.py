"""What every trainer does around the loop: a store or an online target that fits, a draft vocabulary, the target's output.

Shapes: C rows of a chunk, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from data_prep.store import MANIFEST, FeatureStore, read_manifest
from heads.errors import HeadwayError, sha256_file
from heads.losses import Output
from heads.target import TargetEnds, fingerprint, resolve
from heads.versions import versions
from heads.vocabulary import DraftVocabulary
from train.accelerator import make_accelerator
from train.dry_run import dry_run
from train.loop import prepare, train
from train.method import Method
from train.online import OnlinePlan, OnlineStore, plan_online, text_of
from train.pilot import pilot
from train.recipe import Recipe, as_json
from train.sampler import split_rows
from train.state import RunFolder

# What a run's weights depend on.
VERSIONS = ("headway", "torch", "transformers", "accelerate", "deepspeed")


class VocabularyMethod(Method, Protocol):
    """A method whose head has a draft vocabulary: its size, and the share of the supervised tokens that it covers."""

    vocabulary_size: int
    coverage: dict[str, float]


def run_recipe(recipe: Recipe, make_method: Callable[[Any, FeatureStore, TargetEnds], VocabularyMethod]) -> None:
    """Train by a recipe from start, or from where it was, to its end; or what its `dry_run` or `pilot` asks for.

    Raises HeadwayError for a store of another target, and whatever method and loop object to.
    """
    accelerator = make_accelerator(recipe)
    target = {"name": recipe.target, "fingerprint": fingerprint(resolve(recipe.target))}
    planned: OnlinePlan | None = None
    if recipe.data.features is None:
        planned = plan_online(recipe, accelerator.device, accelerator.print)
        features = {"manifest_sha256": planned.digest, **planned.manifest["totals"]}
    else:
        features = _store_facts(Path(recipe.data.features), target)
    identity = {"recipe": as_json(recipe), "target": target, "features": features}
    folder = RunFolder(recipe.out, identity)
    trial = recipe.dry_run or recipe.pilot is not None
    if folder.finished and not trial:
        best = folder.finished["best"]
        accelerator.print(f"{recipe.out}: already finished (replayed tau {best['replayed_tau']:.3f}); nothing to do")
        return
    store = _open(recipe, planned, accelerator)
    dtype = (
        "float32" if accelerator.mixed_precision == "no" else "auto"
    )  # the teacher as precise as what learns from it
    ends = TargetEnds.load(recipe.target, dtype, str(accelerator.device))
    method = make_method(recipe, store, ends)
    coverage = " ".join(f"{kind} {share:.2%}" for kind, share in method.coverage.items())
    accelerator.print(
        f"{len(store)} conversations, {store.tokens:,} tokens, {store.supervised_tokens / store.tokens:.1%} supervised; "
        f"draft vocabulary {method.vocabulary_size:,} of {ends.vocab_size:,}, coverage: {coverage}"
    )
    if recipe.pilot is not None:
        pilot(recipe, store, accelerator, lambda: make_method(recipe, store, ends))
    elif recipe.dry_run:
        dry_run(prepare(method, recipe, store, accelerator), ends)
    else:
        train(method, recipe, store, folder, accelerator)
    accelerator.end_training()


def _store_facts(folder: Path, target: dict[str, Any]) -> dict[str, Any]:
    """What a run's identity says of its store. Raises HeadwayError for one of another target."""
    manifest = read_manifest(folder)
    made_for = manifest["target"]
    if made_for["fingerprint"] != target["fingerprint"]:
        raise HeadwayError(
            f"{folder}: collected from target {made_for['name']} ({made_for['fingerprint'][:12]}), the recipe's is "
            f"{target['name']} ({target['fingerprint'][:12]}); collect again, or name the target that was used"
        )
    return {"manifest_sha256": sha256_file(folder / MANIFEST), **manifest["totals"]}


def _open(recipe: Recipe, planned: OnlinePlan | None, accelerator: Accelerator) -> FeatureStore:
    if planned is not None:
        return OnlineStore.load(planned, recipe, accelerator)
    assert recipe.data.features is not None
    return FeatureStore.open(recipe.data.features, checksums=accelerator.is_main_process)


def supervised_counts(store: FeatureStore, held_out: int) -> dict[str, Tensor]:
    """[V] each: how often each token is supervised in the "training" and in the "held_out" conversations."""
    held_out_V = torch.zeros_like(store.supervised_counts())
    for row in split_rows(store, held_out)[1]:
        ids_T, turn_T = text_of(store, row)
        held_out_V += torch.bincount(ids_T[turn_T > 0], minlength=len(held_out_V))
    return {"training": store.supervised_counts() - held_out_V, "held_out": held_out_V}


def coverage(vocabulary: DraftVocabulary, counts: dict[str, Tensor]) -> dict[str, float]:
    """The share of the supervised tokens of each part that the vocabulary holds."""
    return {part: vocabulary.coverage(counts_V) for part, counts_V in counts.items()}


def special_ids(tokenizer: Any) -> set[int]:
    """All special tokens, the reserved ones included."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def facts(made_by: str, method: VocabularyMethod) -> dict[str, Any]:
    """What every head's manifest says beside the loop's own entries."""
    return {
        "kind": "head",
        "made_by": made_by,
        "versions": versions(*VERSIONS),
        "draft_vocabulary": {"size": method.vocabulary_size, "coverage": method.coverage},
    }


def restricted_output(ends: TargetEnds, ids_D: Tensor, probe_CH: Tensor) -> Output:
    """The target's output function over the draft vocabulary, [C, H] -> [C, D]; a gradient goes through to the states.

    Where that function is the plain product with lm_head, which is found out on the real states `probe_CH`, only the rows of the
    draft vocabulary are multiplied; with a soft cap, scale or bias the whole function runs and its columns are taken.
    """
    weight_VH = ends.lm_head_weight
    everything = len(ids_D) == len(weight_VH)
    ids_D = ids_D.to(weight_VH.device)
    weight_DH = weight_VH if everything else weight_VH[ids_D]

    def whole(last_CH: Tensor) -> Tensor:
        logits_CV = ends.logits(last_CH.to(weight_VH.device, weight_VH.dtype))
        return logits_CV if everything else logits_CV[..., ids_D]

    def plain(last_CH: Tensor) -> Tensor:
        return last_CH.to(weight_DH.dtype) @ weight_DH.T

    expected = whole(probe_CH).float()
    error = (plain(probe_CH.to(weight_VH.device)).float() - expected).abs().max()
    return plain if error <= 1e-2 * expected.abs().max() else whole
