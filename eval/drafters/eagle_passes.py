"""Passes of an EAGLE head over its own cache (methods.md, section 4).

The cache holds the keys of committed tokens alone, made from the target's true states: what a round drafts lies
behind them and is overwritten by the next round. Row t of it joins the state of position t with token t + 1, so that it is
one row shorter than the text.

Shapes: B rows, L tokens committed, W nodes of a draft pass, M nodes drafted in this round so far, C slots, H hidden, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eval.cache import SlotCache
from eval.drafters import Committed
from heads.eagle import EagleHead

FIRST_TOKENS = 256  # room in the cache at the start

Lookup = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TargetFunctions:
    """What an EAGLE head borrows of its target: the embedding ([...] ids -> [..., H]) and the output function."""

    embed: Lookup
    logits: Lookup


def drafts_left(limit: int, tokens: int) -> int:
    """How many drafts a head of `limit` positions may add to a text of so many tokens, its root included.

    Draft j (from 1) is predicted at position tokens - 3 + j: the first one where the target's last state stands.
    """
    return max(0, limit - tokens + 2)


class EaglePasses:
    """Passes of a head over its cache; `cache.lengths` are the rows that are committed: the text's tokens but one."""

    def __init__(
        self, head: EagleHead, target: TargetFunctions, rows: int, device: torch.device, compiled: bool
    ) -> None:
        self.head, self._target = head, target
        self.limit = head.config.max_position_embeddings
        self.cache = SlotCache(head.config.num_layers, rows, FIRST_TOKENS, device, fixed=compiled)
        self._rows_B = torch.arange(rows, device=device)
        self._pending: list[Committed] = []
        self._run = _compiled_run(head) if compiled else head.run

    def observe(self, committed: Committed) -> None:
        """Keep what a pass of the target committed until the next draft reads it."""
        self._pending.append(committed)

    def forget(self) -> None:
        """No text can be drafted for any more."""
        self._pending.clear()

    def follow(self, sequences: list[list[int]], drafts: int) -> tuple[Tensor, Tensor]:
        """Read all that was committed: (features, hidden) [B, H] of the row that the root belongs to.

        `drafts`: nodes that `step` will be given in this round at most.
        """
        cache, device = self.cache, self._rows_B.device
        lengths = [len(ids) - 1 for ids in sequences]
        new = [length - old for length, old in zip(lengths, cache.lengths, strict=True)]
        # one copy to the device, of pageable memory: the host need not wait for it
        lengths_B, new_B = torch.tensor([lengths, new]).to(device, non_blocking=True)
        width = max(new)
        last_BLH, taps, next_BL = self._gathered(width)
        cache.reserve(max(lengths) + drafts)
        cache.begin(width)
        step_L = torch.arange(width, device=device)
        positions_BL = (cache.lengths_B[:, None] + step_L).clamp(max=self.limit - 1)
        visible_BLC = self._slots_behind()[:, None] <= step_L[:, None]
        features_BLH = self.head.features(last_BLH, taps)
        found = self.head.run(features_BLH, self._target.embed(next_BL), positions_BL, visible_BLC[:, None], cache)
        cache.lengths, cache.lengths_B = lengths, lengths_B
        features_BH, hidden_BH = (part[self._rows_B, (new_B - 1).clamp(min=0)] for part in found)
        return features_BH, hidden_BH

    def step(
        self, features_BWH: Tensor, token_BW: Tensor, depth: int, ancestors_BWM: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass over W drafts of a depth (from 1): (features, hidden) [B, W, H] after them.

        `features_BWH`: of each draft's parent. `ancestors_BWM`: which of this round's drafts each one sees, those of this
        pass last; it may lack the rows' axis. None: a chain, which sees all.
        """
        width = token_BW.shape[1]
        drafted = depth if ancestors_BWM is None else ancestors_BWM.shape[-1]
        self.cache.begin(width, behind=drafted - width)
        position_B1 = (self.cache.lengths_B[:, None] + depth - 1).clamp(max=self.limit - 1)
        behind_BC = self._slots_behind()
        mask_BWC = (behind_BC < depth)[:, None] if ancestors_BWM is None else _draft_mask(behind_BC, ancestors_BWM)
        embeds_BWH = self._target.embed(token_BW)
        return self._run(features_BWH, embeds_BWH, position_B1.expand(-1, width), mask_BWC[:, None], self.cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        return self.head.logits(hidden, self._target.logits)

    def _slots_behind(self) -> Tensor:
        """[B, C]: how far each slot in view lies behind the committed ones; negative for those."""
        return torch.arange(self.cache.view, device=self._rows_B.device) - self.cache.lengths_B[:, None]

    def _gathered(self, width: int) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        """States, taps and NEXT tokens of everything committed since the last draft, left-aligned, `width` columns."""
        parts, self._pending = self._pending, []
        nexts = [
            part.tokens_BL.roll(-1, 1).scatter(1, part.counts_B[:, None] - 1, part.root_B[:, None]) for part in parts
        ]
        lasts, taps = [part.last_BLH for part in parts], [part.taps for part in parts]
        if len(parts) == 1:
            return lasts[0][:, :width], {tap: found[:, :width] for tap, found in taps[0].items()}, nexts[0][:, :width]
        valid_BL = torch.cat(
            [
                torch.arange(part.tokens_BL.shape[1], device=part.counts_B.device) < part.counts_B[:, None]
                for part in parts
            ],
            1,
        )
        order_BL = (~valid_BL).to(torch.int8).argsort(dim=1, stable=True)[:, :width]

        def aligned(pieces: list[Tensor]) -> Tensor:
            joined = torch.cat(pieces, 1)
            index = order_BL if joined.dim() == 2 else order_BL[..., None].expand(-1, -1, joined.shape[2])
            return joined.gather(1, index)

        return aligned(lasts), {tap: aligned([found[tap] for found in taps]) for tap in taps[0]}, aligned(nexts)


@lru_cache(maxsize=8)
def _compiled_run(head: EagleHead) -> Callable[..., tuple[Tensor, Tensor]]:
    """Draft steps as one graph for each width; prompts, of which hardly two have the same length, are not run by it."""
    return torch.compile(head.run, fullgraph=True, dynamic=False)


def _draft_mask(behind_BC: Tensor, ancestors_BWM: Tensor) -> Tensor:
    """Bool [B, W, C]: each draft sees the committed slots, and of those behind them the ones in `ancestors_BWM`."""
    if ancestors_BWM.dim() == 2:
        ancestors_BWM = ancestors_BWM.expand(len(behind_BC), -1, -1)
    rows, width, drafted = ancestors_BWM.shape
    index_BC = behind_BC.clamp(0, drafted - 1)
    seen_BWC = ancestors_BWM.gather(2, index_BC[:, None].expand(rows, width, -1))
    return (behind_BC < 0)[:, None] | (seen_BWC & (behind_BC < drafted)[:, None])
