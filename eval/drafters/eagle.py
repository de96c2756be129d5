"""EAGLE heads as drafters (methods.md, section 4): a chain, and a static tree. Dynamic trees: dynamic_tree.py.

Shapes: B rows, W nodes of a draft pass, M nodes without the root, K drafts of a chain, R candidates, H hidden, D draft
vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.drafters.chain import ChainDraws, draft_context
from eval.drafters.eagle_passes import EaglePasses, TargetFunctions, drafts_left
from eval.sampling import Sampling
from eval.tree import DraftTree, TreeShape
from heads.eagle import EagleHead
from heads.errors import HeadwayError

log = logging.getLogger(__name__)

DRAFT_LENGTH = 4


class EagleDrafting:
    """What the drafters of this family share: the head's passes, their start, how deep a round may go.

    Where a text nears the head's last position its drafts get shorter and then stop, which is logged once.
    """

    name = "eagle"

    def __init__(self, head: EagleHead, target: TargetFunctions, depth: int, most_drafts: int, compiled: bool) -> None:
        if depth < 1:
            raise HeadwayError(f"draft length {depth}: it must be at least 1")
        self.head, self.target, self.depth, self.most_drafts = head, target, depth, most_drafts
        self.taps, self.compiled = tuple(head.taps), compiled
        self.target_ids_D = head.target_ids()
        self.limit = head.config.max_position_embeddings
        self._told = False

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """An empty cache; the prompts are read in the first round."""
        self._chooser, self._sampling = chooser, sampling
        self.passes = EaglePasses(self.head, self.target, rows, self.target_ids_D.device, self.compiled)

    def observe(self, committed: Committed) -> None:
        """Keep the states that the next draft starts from."""
        self.passes.observe(committed)

    def counts(self, sequences: list[list[int]], length: int | None) -> list[int]:
        """The depth that each row's draft may have in this round."""
        most = self.depth if length is None else min(self.depth, length)
        counts = [min(most, drafts_left(self.limit, len(ids))) for ids in sequences]
        if min(counts) < most and not self._told:
            self._told = True
            log.warning(
                "the head has %d positions: texts that reach them are decoded without drafts from there on", self.limit
            )
        if not any(counts):
            self.passes.forget()
        return counts

    def counts_B(self, counts: list[int]) -> Tensor:
        """The same on the device."""
        return torch.tensor(counts).to(self.target_ids_D.device, non_blocking=True)


class EagleDrafter(EagleDrafting):
    """A chain: greedy at temperature 0, above it drawn from the draft's own law under the target's settings."""

    def __init__(
        self,
        head: EagleHead,
        target: TargetFunctions,
        draft_length: int = DRAFT_LENGTH,
        sampled: bool = True,
        compiled: bool = False,
    ) -> None:
        """`sampled` False drafts the head's first choices at any temperature; `compiled`: draft steps by torch.compile.

        Raises HeadwayError for a draft length below 1.
        """
        super().__init__(head, target, draft_length, draft_length, compiled)
        self.sampled = sampled

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        super().start(rows, chooser, sampling if self.sampled else replace(sampling, temperature=0.0))
        self._start_B: Tensor | None = None
        self._plain = self._sampling == Sampling()

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        if self._start_B is None:
            self._start_B = committed.counts_B  # the prompts' lengths, where penalties count from

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """A chain a row, of `most_drafts` tokens or fewer."""
        counts = self.counts(sequences, length)
        depth = max(counts)
        if depth == 0:
            return DraftTree.root_only(root_B)
        features_BH, hidden_BH = self.passes.follow(sequences, depth)
        counts_B = self.counts_B(counts)
        if self._plain:
            tokens_BK = self._first_choices(features_BH, hidden_BH, depth)
            return DraftTree.chain(root_B, tokens_BK, counts_B if min(counts) < depth else None)
        assert self._start_B is not None, "draft before observe"
        context = draft_context(self._sampling, sequences, self._start_B)
        draws = ChainDraws(self._sampling, self._chooser, context, counts_B)
        token_B = draws.draw(self._logits_over_vocabulary(hidden_BH))
        for step in range(1, depth):
            features_BH, hidden_BH = self._step(features_BH, token_B, step)
            token_B = draws.draw(self._logits_over_vocabulary(hidden_BH))
        return draws.tree(root_B, ragged=min(counts) < depth)

    def _first_choices(self, features_BH: Tensor, hidden_BH: Tensor, depth: int) -> Tensor:
        tokens = [self._best(hidden_BH)]
        for step in range(1, depth):
            features_BH, hidden_BH = self._step(features_BH, tokens[-1], step)
            tokens.append(self._best(hidden_BH))
        return torch.stack(tokens, 1)

    def _best(self, hidden_BH: Tensor) -> Tensor:
        return self.target_ids_D[self.passes.logits(hidden_BH).argmax(-1)]

    def _step(self, features_BH: Tensor, token_B: Tensor, step: int) -> tuple[Tensor, Tensor]:
        features_B1H, hidden_B1H = self.passes.step(features_BH[:, None], token_B[:, None], step)
        return features_B1H[:, 0], hidden_B1H[:, 0]

    def _logits_over_vocabulary(self, hidden_BH: Tensor) -> Tensor:
        """[B, V]: tokens outside the draft vocabulary cannot be drafted."""
        logits_BD = self.passes.logits(hidden_BH)
        vocab_size = self.head.config.vocab_size
        if logits_BD.shape[1] == vocab_size:
            return logits_BD
        return logits_BD.new_full((len(logits_BD), vocab_size), -torch.inf).index_copy(1, self.target_ids_D, logits_BD)


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth: whose child each is (place among the nodes expanded one level above), with which rank.

    `expanded`: places, within the level, of those that have children; `ancestors`: which expanded nodes so far each of
    them sees, itself included.
    """

    parents: Tensor
    ranks: Tensor
    width: int
    expanded: Tensor
    ancestors: Tensor


@lru_cache(maxsize=64)
def _levels(shape: TreeShape, device: torch.device) -> tuple[_Level, ...]:
    inner = {path[:-1] for path in shape.paths}
    above: list[tuple[int, ...]] = [()]
    seen: list[tuple[int, ...]] = []
    levels = []
    for depth in range(1, shape.max_depth + 1):
        paths = [path for path in shape.paths if len(path) == depth]
        expanded = [path for path in paths if path in inner]
        seen += expanded
        ancestors = [[path[: len(other)] == other for other in seen] for path in expanded]
        levels.append(
            _Level(
                torch.tensor([above.index(path[:-1]) for path in paths], device=device),
                torch.tensor([path[-1] for path in paths], device=device),
                1 + max(path[-1] for path in paths),
                torch.tensor([paths.index(path) for path in expanded], dtype=torch.int64, device=device),
                torch.tensor(ancestors, dtype=torch.bool, device=device).view(len(expanded), len(seen)),
            )
        )
        above = expanded
    return tuple(levels)


class EagleTreeDrafter(EagleDrafting):
    """A static tree: the node at path (r0, r1, ...) is its parent's r-th choice. Chosen without sampling, at any temperature."""

    name = "eagle-static"

    def __init__(
        self,
        head: EagleHead,
        target: TargetFunctions,
        shape: TreeShape,
        draft_length: int | None = None,
        compiled: bool = False,
    ) -> None:
        """Nodes deeper than `draft_length` are left out. Raises HeadwayError for a rank that the head's vocabulary lacks."""
        if max(shape.ranks, default=0) >= len(head.target_ids()):
            raise HeadwayError(
                f"tree with candidate {max(shape.ranks)}: the head's vocabulary has {len(head.target_ids())} tokens"
            )
        depth = shape.max_depth if draft_length is None else min(draft_length, shape.max_depth)
        self.shape = shape.cut(depth)
        super().__init__(head, target, depth, len(self.shape.paths), compiled)

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """The tree, down to the depth that the round and the head's positions allow."""
        counts = self.counts(sequences, length)
        depth = max(counts)
        if depth == 0:
            return DraftTree.root_only(root_B)
        shape = self.shape.cut(depth)
        features_BH, hidden_BH = self.passes.follow(sequences, len(shape.paths))
        features_BWH, hidden_BWH = features_BH[:, None], hidden_BH[:, None]
        tokens: list[Tensor] = []
        for number, level in enumerate(_levels(shape, root_B.device), 1):
            best_BWR = self.passes.logits(hidden_BWH).topk(level.width).indices
            tokens.append(self.target_ids_D[best_BWR[:, level.parents, level.ranks]])
            if number < depth:
                features_BWH, hidden_BWH = self.passes.step(
                    features_BWH[:, level.parents[level.expanded]],
                    tokens[-1][:, level.expanded],
                    number,
                    level.ancestors,
                )
        tree = DraftTree.static(root_B, torch.cat(tokens, 1), shape)
        return tree if min(counts) == depth else tree.cut(self.counts_B(counts))
