"""What the verification rules share: the target's laws at the nodes of a tree, the way down it, and the result.

Shape suffixes: B rows, N tree nodes, L = deepest node + 1, V vocabulary, E draft tokens on a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.law import Law, dense
from eval.sampling import Context, Sampling, non_finite, target_law
from eval.tree import DraftTree


@dataclass(frozen=True)
class HostVerified:
    """A round's result as host numbers, one entry a row. `path` starts with the root's node index, 0."""

    drafted: list[int]
    accepted: list[int]
    path: list[list[int]]
    emitted: list[list[int]]


@dataclass(frozen=True)
class Verified:
    """What verification decided, on the device.

    drafted_B   drafts offered.
    accepted_B  drafts accepted.
    path_BL     node indices from the root (0) to the last accepted draft, then -1: the cache slots to commit.
    next_B      the target's own token after them (the bonus token): the next round's root.
    emitted_BL  tokens of the accepted drafts, then next_B, then -1: what the output gains, accepted + 1 a row.
    bad_B       depth at which a row met logits without a law (NaN, +inf, all -inf), or -1.
    """

    drafted_B: Tensor
    accepted_B: Tensor
    path_BL: Tensor
    next_B: Tensor
    emitted_BL: Tensor
    bad_B: Tensor

    def host(self, positions: Sequence[int], live: Sequence[bool] | None = None) -> HostVerified:
        """Copy to the host in one transfer: the round's only synchronisation.

        `positions`: tokens of each row's output before the round. Raises HeadwayError that names row and output
        position if a live row's logits were not finite.
        """
        counts_B3 = torch.stack([self.drafted_B, self.accepted_B, self.bad_B], 1)
        packed_BP = torch.cat([counts_B3, self.path_BL, self.emitted_BL], 1)
        length = self.path_BL.shape[1]
        drafted, accepted, path, emitted = [], [], [], []
        for row, (offered, count, bad, *rest) in enumerate(packed_BP.tolist()):
            if bad >= 0 and (live is None or live[row]):
                raise non_finite(row, positions[row] + bad)
            drafted.append(offered)
            accepted.append(count)
            path.append(rest[: count + 1])
            emitted.append(rest[length : length + count + 1])
        return HostVerified(drafted, accepted, path, emitted)


class TargetLaws:
    """The target's law at nodes of a draft tree, made when a rule asks for it: [B, V] at a time, never [B, N, V]."""

    def __init__(self, logits_BNV: Tensor, tree: DraftTree, sampling: Sampling, context: Context | None) -> None:
        self.logits_BNV, self.tree, self.sampling, self.context = logits_BNV, tree, sampling, context
        self.rows_B = torch.arange(logits_BNV.shape[0], device=logits_BNV.device)
        self.vocab_size = logits_BNV.shape[2]
        self.dtype = torch.float64 if logits_BNV.dtype == torch.float64 else torch.float32

    def at(self, node_B: Tensor) -> tuple[Law, Tensor]:
        """The law after one node of each row, and Bool [B]: is it finite?"""
        context = self.context
        if context is not None and self.sampling.needs_context:
            path_BL = self.tree.paths()[self.rows_B, node_B]
            drafts_BE = self.tree.tokens_BN.gather(1, path_BL[:, 1:].clamp(min=0))
            context = context.extended(drafts_BE, (path_BL[:, 1:] >= 0).sum(1))
        return target_law(self.logits_BNV[self.rows_B, node_B], self.sampling, context)

    def probs_at(self, node_B: Tensor) -> tuple[Tensor, Tensor]:
        """The same with the law as probabilities [B, V]."""
        law, finite_B = self.at(node_B)
        return dense(law, self.vocab_size, self.dtype), finite_B


class Walk:
    """Where each row stands on its way down the tree; rows that have stopped keep their node."""

    def __init__(self, tree: DraftTree) -> None:
        first_B = tree.tokens_BN[:, 0]
        self.node_B = torch.zeros_like(first_B)
        self.live_B = torch.ones_like(first_B, dtype=torch.bool)
        self.accepted_B = torch.zeros_like(first_B)
        self.bad_B = torch.full_like(first_B, -1)
        self.steps = [self.node_B]

    def saw(self, finite_B: Tensor, depth: int) -> None:
        """Note the depth at which a live row first met a law that is not finite."""
        self.bad_B = torch.where(self.live_B & ~finite_B & (self.bad_B < 0), depth, self.bad_B)

    def down(self, child_B: Tensor) -> None:
        """Live rows go to their child; those whose child is -1 stop."""
        self.live_B = self.live_B & (child_B >= 0)
        self.node_B = torch.where(self.live_B, child_B, self.node_B)
        self.accepted_B = self.accepted_B + self.live_B
        self.steps.append(torch.where(self.live_B, child_B, -1))

    def result(self, tree: DraftTree, next_B: Tensor) -> Verified:
        """Pack the path and the emitted tokens."""
        path_BL = torch.stack(self.steps[: tree.max_depth + 1], 1)
        return verified(tree, self.accepted_B, path_BL, next_B, self.bad_B)


def verified(tree: DraftTree, accepted_B: Tensor, path_BL: Tensor, next_B: Tensor, bad_B: Tensor) -> Verified:
    """The result, with the emitted tokens read off the path."""
    drafts_BL = tree.tokens_BN.gather(1, path_BL.clamp(min=0)).where(path_BL >= 0, -1)
    emitted_BL = torch.cat([drafts_BL[:, 1:], torch.full_like(next_B, -1)[:, None]], 1)
    emitted_BL = emitted_BL.scatter(1, accepted_B[:, None], next_B[:, None])
    return Verified(tree.counts_B, accepted_B, path_BL, next_B, emitted_BL, bad_B)
