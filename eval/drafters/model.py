"""A small causal LM as a drafter (methods.md, section 2; Leviathan et al. 2023): a chain, one forward pass a draft token.

At temperature 0 a chain of argmaxes, above it a chain sampled from the draft's own law under the target's settings. The
draft's cache follows the texts: before each round it forgets the drafts that a text did not take, and reads what the
text has gained (the target's own token, and the last draft of a chain that was accepted whole).

Shapes: B rows, T tokens fed, H hidden, V vocabulary of the target.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.drafters.chain import ChainDraws, draft_context
from eval.masks import position_limit
from eval.passes import TargetPasses
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError
from heads.target import Target

log = logging.getLogger(__name__)

DRAFT_LENGTH = 5
FIRST_TOKENS = 256  # room in the draft's cache at the start; it grows by doubling
NAMED = 3  # differing tokens that an error names


def check_same_tokens(draft: Target, target: Target) -> None:
    """Raise HeadwayError, naming the first ids that differ, unless both tokenizers give every id the same token.

    Rows of the embedding past the tokenizer's ids are padding and may differ in number.
    """
    ours, theirs = ({id: token for token, id in of.tokenizer.get_vocab().items()} for of in (draft, target))
    differing = sorted(id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id))
    if differing:
        named = ", ".join(f"{id} is {ours.get(id)!r} against {theirs.get(id)!r}" for id in differing[:NAMED])
        raise HeadwayError(
            f"draft model '{draft.name}' ({len(ours)} tokens) has not the tokenizer of target '{target.name}' "
            f"({len(theirs)} tokens): {len(differing)} ids differ, {named}; use a draft model that shares it"
        )


class DraftPasses(TargetPasses):
    """Passes of the draft model. `cache.lengths` are the tokens of each text that are cached, drafts included."""

    def __init__(self, draft: Target, rows: int) -> None:
        super().__init__(draft, rows, min(FIRST_TOKENS, position_limit(draft)))
        self.last_position = position_limit(draft) - 1
        self.rows_B = torch.arange(rows, device=draft.device)

    def follow(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Bring the cache to each text's end; returns the states [B, H] there.

        A text past the draft's last position is left as it is, and its state has no meaning.
        """
        kept = [min(length, len(ids) - 1) for length, ids in zip(self.cache.lengths, sequences, strict=True)]
        new = [
            list(ids[length:]) if len(ids) - 1 <= self.last_position else []
            for length, ids in zip(kept, sequences, strict=True)
        ]
        counts, width = [len(ids) for ids in new], max(map(len, new))
        # one copy to the device, of pageable memory: the host need not wait for it
        packed = [[length, len(ids), *ids, *[0] * (width - len(ids))] for length, ids in zip(kept, new, strict=True)]
        packed_BX = torch.tensor(packed).to(self.target.device, non_blocking=True)
        self.cache.lengths, self.cache.lengths_B = kept, packed_BX[:, 0]
        counts_B, ids_BT = packed_BX[:, 1], packed_BX[:, 2:]
        last_BTH = self._feed(ids_BT)
        self.cache.grow(counts_B, counts)
        return last_BTH[self.rows_B, (counts_B - 1).clamp(min=0)]

    def step(self, token_B: Tensor, grown_B: Tensor, grown: list[int]) -> Tensor:
        """Read one token a row; returns the states [B, H]. Rows whose `grown` is 0 do not keep it."""
        last_B1H = self._feed(token_B[:, None])
        self.cache.grow(grown_B, grown)
        return last_B1H[:, 0]

    def _feed(self, ids_BT: Tensor) -> Tensor:
        rows, width = ids_BT.shape
        self.cache.reserve(max(self.cache.lengths) + width)
        steps_T = torch.arange(width, device=ids_BT.device)
        positions_BT = (self.cache.lengths_B[:, None] + steps_T).clamp(max=self.last_position)
        ancestors_BTT = (steps_T[:, None] >= steps_T).expand(rows, -1, -1)
        # ids past the draft's rows are padding of the target's own: no text has them, and none may be looked up here
        return self._run(ids_BT.clamp(max=self.target.vocab_size - 1), positions_BT, ancestors_BTT).last


class ModelDrafter:
    """Drafts `draft_length` tokens a round with a draft model of the target's tokenizer.

    Where a text nears the draft's last position its drafts get shorter and then stop, which is logged once.
    """

    name = "model"
    taps: tuple[int, ...] = ()

    def __init__(self, draft: Target, target: Target, draft_length: int = DRAFT_LENGTH, sampled: bool = True) -> None:
        """`sampled` False drafts the draft's argmax at any temperature.

        Raises HeadwayError for another tokenizer, another device, and a draft length below 1.
        """
        if draft_length < 1:
            raise HeadwayError(f"model: draft_length {draft_length} must be at least 1")
        check_same_tokens(draft, target)
        if draft.device != target.device:
            raise HeadwayError(f"draft model '{draft.name}' is on {draft.device}, the target on {target.device}")
        self.model, self.vocab_size, self.sampled = draft, target.vocab_size, sampled
        self.most_drafts = self.depth = draft_length
        self.limit = position_limit(draft)
        self._told = False

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """An empty cache; the prompts are read in the first round."""
        self._passes, self._chooser = DraftPasses(self.model, rows), chooser
        self._sampling = sampling if self.sampled else replace(sampling, temperature=0.0)
        self._start_B: Tensor | None = None

    def observe(self, committed: Committed) -> None:
        """Note the prompts' lengths, where penalties count from; all else is read from the texts."""
        if self._start_B is None:
            self._start_B = committed.counts_B

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """A chain a row: `depth` tokens or `length`, fewer where the draft's positions end."""
        most = length or self.depth
        counts = [min(most, max(0, self.limit + 1 - len(ids))) for ids in sequences]
        self._tell(counts, most)
        deepest = max(counts)
        if deepest == 0:
            return DraftTree.root_only(root_B)
        counts_B = torch.tensor(counts).to(root_B.device, non_blocking=True)
        last_BH = self._passes.follow(sequences)
        assert self._start_B is not None, "draft before observe"
        context = draft_context(self._sampling, sequences, self._start_B)
        draws = ChainDraws(self._sampling, self._chooser, context, counts_B)
        token_B = draws.draw(self._logits(last_BH))
        for depth in range(1, deepest):
            grown = [int(count > depth) for count in counts]
            last_BH = self._passes.step(token_B, (counts_B > depth).long(), grown)
            token_B = draws.draw(self._logits(last_BH))
        return draws.tree(root_B, ragged=min(counts) < deepest)

    def _logits(self, last_BH: Tensor) -> Tensor:
        """[B, V] over the target's ids: rows that only the draft has are cut, rows that it lacks cannot be drafted."""
        logits_BV = self.model.logits(last_BH)[:, : self.vocab_size]
        missing = self.vocab_size - logits_BV.shape[1]
        return F.pad(logits_BV, (0, missing), value=-torch.inf) if missing else logits_BV

    def _tell(self, counts: list[int], most: int) -> None:
        if min(counts) < most and not self._told:
            self._told = True
            log.warning(
                "draft model '%s' has %d positions: texts that reach them are decoded without drafts from there on",
                self.model.name,
                self.limit,
            )
