"""Wrong rules that the enumeration must kill: each patches one part of the shipped drafting or verification.

Every one has been shipped by somebody or is one step away from code that was. The names of the parts that are patched
are those of eval/tree.py, eval/verify.py and eval/chooser.py.

Shape suffixes: R rows or cases, S prefixes, N nodes, W siblings, V vocabulary, L emitted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eval import chooser as choosers
from eval import coin_grid
from eval import tree as trees
from eval import verify as verification
from eval.chooser import Chooser
from eval.enumeration import Cases, Experiment, ForkingChooser, deviations, random_cases
from eval.experiments import (
    BLOCK_CHAIN,
    IID_TREE,
    IID_WIDE,
    MATCH_SMALL_TREE,
    ONCE_WIDE,
    REJECTION_TREE,
    SAMPLED_CHAIN,
    TYPICAL,
    WARPED_CHAIN,
    warped,
)
from eval.law import Dense, Law, dense, normalised
from eval.sampling import Sampling, target_law
from eval.tree import DraftTree
from eval.verify import Rule, TargetLaws, Verified

CASES, SEED = 60, 1


@dataclass(frozen=True)
class Mutant:
    """A wrong rule: `experiment` run under `change` must deviate from the target's law."""

    name: str
    experiment: Experiment
    change: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[Cases], Cases] = lambda cases: cases

    def deviations(self, count: int = CASES, seed: int = SEED) -> Tensor:
        """Total variation of each case from the target's law, with the change in place."""
        cases = random_cases(count, self.experiment.vocab, self.experiment.shape.max_depth, seed)
        with self.change():
            return deviations(self.experiment, self.prepare(cases))


# --- drafting ---------------------------------------------------------------------------------------------------------

_draw_siblings = trees.draw_siblings


def _drawn(change: Callable[..., Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(trees, "draw_siblings", change)


def _argmax_draft(law_RV: Tensor, width: int, replacement: bool, chooser: Chooser, *where: Any) -> Tensor:
    return law_RV.argsort(dim=-1, descending=True, stable=True)[:, :width]


def _top_two_draft(law_RV: Tensor, *how: Any) -> Tensor:
    second_R1 = law_RV.topk(2).values[:, -1:]
    return _draw_siblings(normalised(law_RV.where(law_RV >= second_R1, 0.0), law_RV), *how)


def _merged_duplicates(law_RV: Tensor, width: int, *how: Any) -> Tensor:
    drawn_RW = _draw_siblings(law_RV, width, *how)
    again_RW = (drawn_RW[:, :, None] == drawn_RW[:, None, :]).tril(-1).any(-1)
    return drawn_RW.masked_fill(again_RW, -1)


def _without_unlikely(law_RV: Tensor, width: int, *how: Any) -> Tensor:
    drawn_RW = _draw_siblings(law_RV, width, *how)
    return drawn_RW.where(law_RV.gather(1, drawn_RW.clamp(min=0)) >= 0.3, -1)


def _only_the_likelier(law_RV: Tensor, width: int, *how: Any) -> Tensor:
    """Of the siblings drawn only the likeliest goes on to be expanded; the others are dropped."""
    drawn_RW = _draw_siblings(law_RV, width, *how)
    likelihood_RW = law_RV.gather(1, drawn_RW.clamp(min=0))
    return drawn_RW.where(torch.arange(width) == likelihood_RW.argmax(1)[:, None], -1)


def _reranked() -> AbstractContextManager[Any]:
    """EAGLE-2's re-ranking of a sampled tree: only the two nodes of highest path probability are verified."""

    def keep_best(logits_RNV: Tensor, tree: DraftTree, *more: Any) -> Verified:
        score_RN = torch.ones(tree.tokens_BN.shape, dtype=torch.float64)
        for node in range(1, tree.nodes):
            parent_R = tree.parents_BN[:, node].clamp(min=0)
            own_R = Dense(tree.draft_law_at(parent_R)).probability(tree.tokens_BN[:, node])
            score_RN[:, node] = score_RN.gather(1, parent_R[:, None])[:, 0] * own_R
        kept = score_RN[:, 1:].sort(dim=1, descending=True, stable=True).indices[:, :2] + 1
        kept_RN = torch.zeros_like(score_RN, dtype=torch.bool).scatter(1, kept, True)
        kept_RN[:, 0] = True
        parents_RN = tree.parents_BN.where(kept_RN, trees.PADDING)
        return shipped(logits_RNV, replace(tree, parents_BN=parents_RN), *more)

    shipped = verification.verify
    return patch.object(verification, "verify", keep_best)


# --- verification -----------------------------------------------------------------------------------------------------


def _rule(name: str, function: Callable[[TargetLaws, DraftTree, Chooser], Verified]) -> AbstractContextManager[Any]:
    return patch.dict(verification.RULES, {name: Rule(name, True, function)})


def _part(name: str, change: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(verification, name, change)


_try_children = verification.try_children


def _last_draw_from_p(
    laws: TargetLaws, tree: DraftTree, chooser: Chooser, walk: Any, target_BV: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    return _try_children(laws, tree, chooser, walk, target_BV, depth)[0], target_BV


def _draw_per_path(laws: TargetLaws, tree: DraftTree, chooser: Chooser) -> Verified:
    """Each root-to-leaf path draws its own tokens from p; the path that matches longest wins."""
    leaves = [node for node in range(tree.nodes) if not (tree.parents_BN[0] == node).any()]
    best = None
    for leaf in leaves:
        on_path_N = tree.mask()[0, leaf]
        path = replace(tree, parents_BN=tree.parents_BN.where(on_path_N, trees.PADDING))
        found = verification.match(laws, path, chooser)
        if best is None:
            best = found
            continue
        longer_B = found.accepted_B > best.accepted_B
        parts = {}
        for name in ("accepted_B", "path_BL", "next_B", "emitted_BL", "bad_B"):
            new, old = getattr(found, name), getattr(best, name)
            parts[name] = torch.where(longer_B[:, None] if new.dim() == 2 else longer_B, new, old)
        best = replace(best, **parts)
    assert best is not None
    return best


def _running_product() -> AbstractContextManager[Any]:
    """Accepts with the product of the ratios along the chain, and keeps the residual of single tokens."""

    def rule(laws: TargetLaws, tree: DraftTree, chooser: Chooser) -> Verified:
        product = [torch.ones(tree.tokens_BN.shape[0], dtype=torch.float64)]

        def ratio(target_B: Tensor, draft_B: Tensor) -> Tensor:
            product.append(torch.where(draft_B > 0, product[-1] * target_B / draft_B, 0.0).clamp(max=1.0))
            return product[-1]

        with patch.object(verification, "acceptance", ratio):
            return shipped(laws, tree, chooser)

    shipped = verification.rejection
    return _rule("rejection", rule)


def _not_renormalised(tree: DraftTree, law_BV: Tensor | None, token_B: Tensor) -> Tensor | None:
    return None if law_BV is None else law_BV.scatter(1, token_B.clamp(min=0)[:, None], 0.0)


def _order_of_q(tree: DraftTree) -> Tensor:
    """Sibling ranks by falling q instead of the order of drawing."""
    assert isinstance(tree.law, Dense)
    own_BN = tree.law.probs_RV.gather(
        1, tree.parents_BN.clamp(min=0)[:, :, None].expand(-1, -1, tree.law.probs_RV.shape[2])
    ).gather(2, tree.tokens_BN[:, :, None])[:, :, 0]
    same_BNN = tree.parents_BN[:, :, None] == tree.parents_BN[:, None, :]
    before_BNN = own_BN[:, None, :] > own_BN[:, :, None]
    return (same_BNN & before_BNN).sum(-1)


def _bonus_after_rejection() -> AbstractContextManager[Any]:
    """A draft rejected at the last place counts as a full round: a bonus token drawn after the rejected draft."""

    def rule(laws: TargetLaws, tree: DraftTree, chooser: Chooser) -> Verified:
        found = shipped(laws, tree, chooser)
        extra_B = found.accepted_B == tree.max_depth - 1
        law, _ = laws.at(torch.full_like(found.accepted_B, tree.nodes - 1))
        bonus_B = chooser.pick(law, tree.max_depth, extra_B)
        last_B = torch.where(extra_B, bonus_B, found.emitted_BL[:, -1])
        emitted_BL = torch.cat([found.emitted_BL[:, :-1], last_B[:, None]], 1)
        return replace(found, accepted_B=found.accepted_B + extra_B, emitted_BL=emitted_BL)

    shipped = verification.rejection
    return _rule("rejection", rule)


class _OneCoinChooser(ForkingChooser):
    """The coin that rejected a draft, uniform on [chance, 1), is used again for the residual draw."""

    def accept(self, probability_B: Tensor, depth: int, trial: int, live_B: Tensor) -> Tensor:
        taken_B = super().accept(probability_B, depth, trial, live_B)
        if depth == 0 and trial == 0:
            self.floor_B = torch.zeros_like(probability_B)
        self.floor_B = torch.where(live_B, probability_B.where(~taken_B, 0.0), self.floor_B)
        return taken_B

    def pick(self, law: Law, depth: int | Tensor, live_B: Tensor) -> Tensor:
        if hasattr(self, "floor_B"):
            probs_BV = dense(law, self.chance_RCO.shape[2], torch.float64)
            ends_BV = probs_BV.cumsum(-1).clamp(max=1.0)
            above_BV = (ends_BV - torch.maximum(ends_BV - probs_BV, self.floor_B[:, None])).clamp(min=0)
            law = Dense(normalised(above_BV, probs_BV))
        return super().pick(law, depth, live_B)

    def draft(self, law: Law, depth: int, trial: int, live_B: Tensor) -> Tensor:
        return ForkingChooser.pick(self, law, depth, live_B)


def _plain_bonus() -> AbstractContextManager[Any]:
    """The token after a fully accepted draft is drawn at temperature 1 without warpers."""

    def at(laws: TargetLaws, node_B: Tensor) -> tuple[Law, Tensor]:
        law, finite_B = shipped(laws, node_B)
        plain, _ = target_law(laws.logits_BNV[laws.rows_B, node_B], Sampling(temperature=1.0))
        leaf_B = node_B == laws.tree.nodes - 1
        probs_BV = torch.where(leaf_B[:, None], dense(plain, laws.vocab_size), dense(law, laws.vocab_size))
        return Dense(probs_BV), finite_B

    shipped = TargetLaws.at
    return patch.object(TargetLaws, "at", at)


def _raw_draft_law() -> AbstractContextManager[Any]:
    """Drafts are drawn at temperature 0.5, the ratio takes q at temperature 1."""

    def cold(law_RV: Tensor, *how: Any) -> Tensor:
        return _draw_siblings(normalised(law_RV**2, law_RV), *how)

    return patch.object(trees, "draw_siblings", cold)


# --- coins and bad numbers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoinMutant:
    """A wrong use of a coin, run on the grid of coins."""

    name: str
    change: Callable[[], AbstractContextManager[Any]]

    def deviations(self, count: int = CASES, seed: int = SEED) -> Tensor:
        """As Mutant.deviations."""
        with self.change():
            return coin_grid.grid_deviations(coin_grid.grid_cases(count, seed))


def _zero_takes_first(probs_BV: Tensor, coin_B: Tensor) -> Tensor:
    running_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(running_BV, coin_B[:, None].contiguous())[:, 0].clamp(max=probs_BV.shape[-1] - 1)


@dataclass(frozen=True)
class BlindMutant:
    """Rows of NaN logits are not reported: whatever is emitted there has no law, and all of it counts as deviation."""

    name: str
    change: Callable[[], AbstractContextManager[Any]]

    def deviations(self, count: int = CASES, seed: int = SEED) -> Tensor:
        """1 for every row of NaN logits that gave a token without an error."""
        logits_R1V = torch.full((count, 1, 4), torch.nan)
        tree = DraftTree.root_only(torch.zeros(count, dtype=torch.int64))
        with self.change():
            chooser = choosers.SeededChooser([seed] * count)
            found = verification.verify(logits_R1V, tree, Sampling(temperature=1.0), chooser)
        return (found.bad_B < 0).double()


def _never_bad(walk: Any, finite_B: Tensor, depth: int) -> None:
    return None


AnyMutant = Mutant | CoinMutant | BlindMutant

MUTANTS: tuple[AnyMutant, ...] = (
    Mutant("typical acceptance", TYPICAL, nullcontext),
    Mutant("argmax draft, softmax q in the ratio", SAMPLED_CHAIN, _drawn(_argmax_draft)),
    Mutant("deterministic children, last draw from p", REJECTION_TREE, _part("try_children", _last_draw_from_p)),
    Mutant("a draw from p per path, longest match wins", MATCH_SMALL_TREE, lambda: _rule("match", _draw_per_path)),
    Mutant("one coin for acceptance and residual", replace(SAMPLED_CHAIN, chooser=_OneCoinChooser), nullcontext),
    Mutant("draft sampled from top-2 of q, raw q in the ratio", SAMPLED_CHAIN, _drawn(_top_two_draft)),
    Mutant("temperature on one side only", SAMPLED_CHAIN, _raw_draft_law),
    Mutant("resample from p instead of the residual", SAMPLED_CHAIN, _part("residual", lambda p_BV, q_BV: p_BV)),
    Mutant("running product with the token's residual", SAMPLED_CHAIN, _running_product),
    Mutant("without replacement, q not renormalised", ONCE_WIDE, _part("draft_law_after", _not_renormalised)),
    Mutant(
        "block acceptance with the token's residual",
        BLOCK_CHAIN,
        _part(
            "block_left",
            lambda p_BV, q_BV, owed_BV, last_B: torch.where(last_B[:, None], p_BV, verification.residual(p_BV, q_BV)),
        ),
    ),
    Mutant(
        "without replacement, tried in order of q",
        ONCE_WIDE,
        lambda: patch.object(DraftTree, "ranks_BN", property(_order_of_q)),
    ),
    Mutant("duplicate i.i.d. siblings merged", IID_WIDE, _drawn(_merged_duplicates)),
    Mutant("a sibling dropped for its own low confidence", IID_WIDE, _drawn(_without_unlikely)),
    Mutant("bonus token after a draft rejected at the last place", SAMPLED_CHAIN, _bonus_after_rejection),
    Mutant("bonus token drawn without the warpers", WARPED_CHAIN, _plain_bonus, prepare=warped),
    CoinMutant("a coin of 0 accepts probability 0", lambda: patch.object(choosers, "accepted", torch.le)),
    CoinMutant(
        "a coin of 0 draws a token of probability 0", lambda: patch.object(choosers, "invert", _zero_takes_first)
    ),
    BlindMutant("a row of NaN gives a token", lambda: patch.object(verification.Walk, "saw", _never_bad)),
    Mutant("kept: sampled tree re-ranked by its own scores", IID_TREE, _reranked),
    Mutant("cut: chain ends before a draw of low confidence", SAMPLED_CHAIN, _drawn(_without_unlikely)),
    Mutant("expanded: only the likelier of two draws goes on", IID_TREE, _drawn(_only_the_likelier)),
)
