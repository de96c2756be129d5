"""Verification: which drafted tokens does the target keep, and which token of its own comes next?

One pure function of (target's logits, draft tree, chooser). The decode loop and the exactness proof call the same
`verify`; only their choosers differ. The rules, all enumerated in tests/eval/test_verify.py:

match          draw y from the target's law at each node reached; a child holds y: go down, else emit y. Exact for every
               draft, and the best rule for drafts chosen without sampling. Laws are made at visited nodes only.
rejection      recursive rejection (Leviathan et al. 2023, algorithm 1; for trees Miao et al. 2024): children are
               tried in the order they were drawn, each rejection leaves norm(max(p - q, 0)). Chains and trees.
block          block verification of a sampled chain (Sun et al. 2024, algorithm 2).
typical_lossy  Medusa's typical acceptance (Cai et al. 2024, section 2.3.1): NOT the target's law.

Shape suffixes: B rows, N tree nodes, L = deepest node + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.chooser import Chooser
from eval.law import Dense, PointMass, dense, normalised, residual, without_token
from eval.sampling import Context, Sampling
from eval.tree import DraftTree
from eval.walk import HostVerified, TargetLaws, Verified, Walk, verified
from heads.errors import HeadwayError

__all__ = ["RULES", "HostVerified", "Rule", "TargetLaws", "Verified", "Walk", "verify"]

# --- match ------------------------------------------------------------------------------------------------------------


def match(laws: TargetLaws, tree: DraftTree, chooser: Chooser) -> Verified:
    """The target draws its own token at each node reached; drafts only save passes. Exact: every token is a draw."""
    walk = Walk(tree)
    next_B = torch.zeros_like(walk.node_B)
    for depth in range(tree.max_depth + 1):
        law, finite_B = laws.at(walk.node_B)
        walk.saw(finite_B, depth)
        token_B = chooser.pick(law, depth, walk.live_B)
        next_B = torch.where(walk.live_B, token_B, next_B)
        walk.down(tree.child_with(walk.node_B, token_B))
    return walk.result(tree, next_B)


# --- rejection --------------------------------------------------------------------------------------------------------


def acceptance(target_B: Tensor, draft_B: Tensor) -> Tensor:
    """min(1, p / q) of one token a row; 0 for a token that the draft law could not have given."""
    return torch.where(draft_B > 0, target_B / draft_B, 0.0).clamp(max=1.0)


def draft_law_of_trial(tree: DraftTree, law_BV: Tensor | None, token_B: Tensor, laws: TargetLaws) -> Tensor:
    """q that a child was drawn from, [B, V]: the sampled draft's law, or all mass on a token chosen without sampling."""
    if law_BV is not None:
        return law_BV
    return dense(PointMass(token_B.clamp(min=0)), laws.vocab_size, laws.dtype)


def draft_law_after(tree: DraftTree, law_BV: Tensor | None, token_B: Tensor) -> Tensor | None:
    """q of the next sibling, once `token_B` was drawn from `law_BV`."""
    return law_BV if law_BV is None or tree.replacement else without_token(law_BV, token_B)


def try_children(
    laws: TargetLaws, tree: DraftTree, chooser: Chooser, walk: Walk, target_BV: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Offer the children of each row's node to the target, in the order they were drawn.

    Returns the accepted child's node index [B] (-1: none), and what the target's law has become [B, V].
    """
    accepted_B = torch.full_like(walk.node_B, -1)
    trying_B = walk.live_B
    draft_BV = tree.draft_law_at(walk.node_B) if isinstance(tree.law, Dense) else None
    for trial in range(tree.max_width):
        child_B = tree.child(walk.node_B, trial)
        trying_B = trying_B & (child_B >= 0)
        token_B = tree.tokens_at(child_B)
        trial_BV = draft_law_of_trial(tree, draft_BV, token_B, laws)
        chance_B = acceptance(Dense(target_BV).probability(token_B), Dense(trial_BV).probability(token_B))
        taken_B = chooser.accept(chance_B, depth, trial, trying_B) & trying_B
        accepted_B = torch.where(taken_B, child_B, accepted_B)
        trying_B = trying_B & ~taken_B
        target_BV = torch.where(trying_B[:, None], residual(target_BV, trial_BV), target_BV)
        draft_BV = draft_law_after(tree, draft_BV, token_B)
    return accepted_B, target_BV


def rejection(laws: TargetLaws, tree: DraftTree, chooser: Chooser) -> Verified:
    """Recursive rejection sampling; one draw a row at the end, from what the target is still owed."""
    walk = Walk(tree)
    last_BV = None
    for depth in range(tree.max_depth + 1):
        target_BV, finite_B = laws.probs_at(walk.node_B)
        walk.saw(finite_B, depth)
        child_B, left_BV = torch.full_like(walk.node_B, -1), target_BV
        if depth < tree.max_depth:
            child_B, left_BV = try_children(laws, tree, chooser, walk, target_BV, depth)
        stops_B = walk.live_B & (child_B < 0)
        last_BV = left_BV if last_BV is None else torch.where(stops_B[:, None], left_BV, last_BV)
        walk.down(child_B)
    assert last_BV is not None
    next_B = chooser.pick(Dense(last_BV), walk.accepted_B, torch.ones_like(walk.live_B))
    return walk.result(tree, next_B)


# --- block ------------------------------------------------------------------------------------------------------------


def block_residual(target_BV: Tensor, draft_BV: Tensor, share_B: Tensor) -> Tensor:
    """max(share * p - q, 0), not normalised: what the block still owes after a prefix kept with weight `share`."""
    return (share_B[:, None] * target_BV - draft_BV).clamp(min=0)


def block_chance(owed_BV: Tensor, share_B: Tensor, is_last_B: Tensor) -> Tensor:
    """Probability h that a prefix is kept if no longer one is."""
    owed_B = owed_BV.sum(-1)
    # In this order: 1 - share is exact near share 1, while owed + 1 would round a small owed mass away.
    below_B = owed_B + (1 - share_B)
    # Nothing owed and share 1: the longer prefix is then kept for certain, and this coin is never read.
    return torch.where(is_last_B, share_B, torch.where(below_B > 0, owed_B / below_B, 0.0))


def block_left(target_BV: Tensor, draft_BV: Tensor, owed_BV: Tensor, is_last_B: Tensor) -> Tensor:
    """The law of the token after a kept prefix [B, V]: the target's own after the whole chain, else what is owed."""
    return torch.where(is_last_B[:, None], target_BV, normalised(owed_BV, target_BV))


def block(laws: TargetLaws, tree: DraftTree, chooser: Chooser) -> Verified:
    """Block verification: a chain's longest prefix whose coin falls, then one draw from that prefix's residual."""
    if tree.max_width > 1 or not isinstance(tree.law, Dense):
        raise HeadwayError("rule 'block' verifies chains sampled from a law; use 'rejection' or 'match' for this draft")
    walk = Walk(tree)
    share_B = torch.ones(walk.node_B.shape, dtype=laws.dtype, device=walk.node_B.device)
    kept_B = torch.zeros_like(walk.node_B)
    last_BV = None
    for depth in range(tree.max_depth + 1):
        target_BV, finite_B = laws.probs_at(walk.node_B)
        walk.saw(finite_B, depth)
        child_B = tree.child(walk.node_B, 0)
        draft_BV = tree.draft_law_at(walk.node_B)
        is_last_B = child_B < 0
        owed_BV = block_residual(target_BV, draft_BV, share_B)
        here_BV = block_left(target_BV, draft_BV, owed_BV, is_last_B)
        if last_BV is None:
            last_BV = here_BV
        else:
            chance_B = block_chance(owed_BV, share_B, is_last_B)
            taken_B = chooser.accept(chance_B, depth, 0, walk.live_B) & walk.live_B
            kept_B = torch.where(taken_B, depth, kept_B)
            last_BV = torch.where(taken_B[:, None], here_BV, last_BV)
        token_B = tree.tokens_at(child_B)
        target_B, draft_B = Dense(target_BV).probability(token_B), Dense(draft_BV).probability(token_B)
        share_B = torch.where(draft_B > 0, share_B * target_B / draft_B, 0.0).clamp(max=1.0)
        walk.down(child_B)
    assert last_BV is not None
    next_B = chooser.pick(Dense(last_BV), kept_B, torch.ones_like(walk.live_B))
    steps_L = torch.arange(tree.max_depth + 1, device=kept_B.device)
    path_BL = torch.stack(walk.steps[: tree.max_depth + 1], 1).where(steps_L <= kept_B[:, None], -1)
    return verified(tree, kept_B, path_BL, next_B, walk.bad_B)


# --- typical acceptance: lossy ----------------------------------------------------------------------------------------

TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


def typical_lossy(laws: TargetLaws, tree: DraftTree, chooser: Chooser) -> Verified:
    """Medusa's typical acceptance: keeps every draft the target finds likely enough, longest path wins. NOT lossless.

    Threshold min(0.09, 0.3 exp(-entropy)) on p, then one draw from p after the longest kept path.
    """
    walk = Walk(tree)
    likely = [torch.ones_like(walk.live_B)]
    for node in range(1, tree.nodes):
        parent_B = tree.parents_BN[:, node]
        target_BV, finite_B = laws.probs_at(parent_B.clamp(min=0))
        entropy_B = torch.special.entr(target_BV).sum(-1)
        threshold_B = (TYPICAL_DELTA * (-entropy_B).exp()).clamp(max=TYPICAL_EPSILON)
        likely.append((Dense(target_BV).probability(tree.tokens_BN[:, node]) > threshold_B) & (parent_B >= 0))
        walk.bad_B = torch.where((parent_B >= 0) & ~finite_B & (walk.bad_B < 0), 0, walk.bad_B)
    likely_BN = torch.stack(likely, 1)
    whole_BN = (likely_BN[:, None, :] | ~tree.mask()).all(-1)
    depth_BN = tree.positions().where(whole_BN & tree.valid_BN, -1)
    accepted_B, node_B = depth_BN.max(1)
    law, finite_B = laws.at(node_B)
    walk.saw(finite_B, 0)
    next_B = chooser.pick(law, accepted_B, walk.live_B)
    return verified(tree, accepted_B, tree.paths()[laws.rows_B, node_B], next_B, walk.bad_B)


@dataclass(frozen=True)
class Rule:
    """A way to verify, and whether the text keeps the target's law."""

    name: str
    lossless: bool
    function: Callable[[TargetLaws, DraftTree, Chooser], Verified]


RULES = {
    rule.name: rule
    for rule in (
        Rule("match", True, match),
        Rule("rejection", True, rejection),
        Rule("block", True, block),
        Rule("typical_lossy", False, typical_lossy),
    )
}


def verify(
    logits_BNV: Tensor,
    tree: DraftTree,
    sampling: Sampling,
    chooser: Chooser,
    context: Context | None = None,
    rule: str | None = None,
) -> Verified:
    """Which drafts are kept and what comes next.

    `logits_BNV`: the target's logits after every node (padding nodes: anything). `context`: the text of each row up to
    and with the root, needed iff `sampling.needs_context`. `rule`: a name in RULES; None takes "match" for drafts
    chosen without sampling and "rejection" for sampled ones. No host synchronisation; see Verified.host.
    """
    if rule is None:
        rule = "match" if isinstance(tree.law, PointMass) else "rejection"
    if rule not in RULES:
        raise HeadwayError(f"no verification rule {rule!r}; choose one of {', '.join(RULES)}")
    if tree.max_depth == 0:
        rule = "match"  # nothing was drafted: all rules draw one token from the target's law
    return RULES[rule].function(TargetLaws(logits_BNV, tree, sampling, context), tree, chooser)
