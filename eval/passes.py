"""Passes of the target over its slot cache: the prefill and the verification of a tree.

Shapes: B rows, T positions, N tree nodes, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch

from eval.cache import SlotCache
from eval.lean import lean_decoder
from eval.masks import check_supported, pass_masks, position_limit
from eval.probe import PROMPTS, SHAPE, needs_probe, probe
from eval.tree import PADDING, DraftTree
from heads.errors import HeadwayError
from heads.target import States, Target


class TargetPasses:
    """The target with a cache for `rows` sequences of up to `tokens` tokens, and `drafts` tree nodes behind them.

    Raises HeadwayError for a target that cannot take back a rejected draft, or texts longer than its position limit.
    """

    def __init__(
        self, target: Target, rows: int, tokens: int, taps: Sequence[int] = (), drafts: int = 0, probing: bool = False
    ) -> None:
        check_supported(target)
        if needs_probe(target) and not probing:
            probe(target, TargetPasses(target, len(PROMPTS), len(PROMPTS[0]), drafts=len(SHAPE.paths), probing=True))
        self.target, self.taps, self.limit = target, tuple(taps), position_limit(target)
        if tokens > self.limit:
            raise HeadwayError(
                f"target '{target.name}' has {self.limit} positions, {tokens} are asked for (prompt and new tokens); "
                "shorten the prompt or lower max_new_tokens"
            )
        # a row that has ended stays in the batch: at its full length, with a root and a draft that nobody reads
        self.tokens = tokens
        self.lean, self.drafts = lean_decoder(target), drafts
        compiled = self.lean is not None and self.lean.compiled
        self.cache = SlotCache(target.num_layers, rows, tokens + 1 + drafts, target.device, fixed=compiled)
        # transformers renamed the argument; both names are in the supported range
        parameters = inspect.signature(type(target.decoder).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, States]:
        """One pass over right-padded prompts. Returns their ids [B, T] and states; every prompt is committed."""
        lengths = [len(prompt) for prompt in prompts]
        longest, device = max(lengths), self.target.device
        ids_BT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
        ancestors_BTT = (
            torch.ones(longest, longest, dtype=torch.bool, device=device).tril().expand(len(prompts), -1, -1)
        )
        positions_BT = torch.arange(longest, device=device).expand(len(prompts), -1)
        states = self._run(ids_BT, positions_BT, ancestors_BTT, prefill=True)
        self.cache.grow(torch.tensor(lengths, device=device), lengths)
        return ids_BT, states

    def fit(self, tree: DraftTree) -> DraftTree:
        """The tree without the nodes that lie past the target's last position; the draft that was offered.

        Which nodes go depends on their depth alone, so what is verified keeps the target's law. Where passes are compiled
        the tree is padded to the largest there is, or is the root alone.
        """
        if self.cache.fixed and 1 < tree.nodes <= self.drafts:
            tree = tree.padded(1 + self.drafts)
        if max(self.cache.lengths) + tree.max_depth < self.limit:
            return tree
        past_BN = self.cache.lengths_B[:, None] + tree.positions() >= self.limit
        return replace(tree, parents_BN=tree.parents_BN.masked_fill(past_BN, PADDING))

    def verify(self, tree: DraftTree) -> States:
        """One pass over the nodes of a tree that fits: states [B, N, H]. Nothing is committed."""
        positions_BN = self.cache.lengths_B[:, None] + tree.positions()
        if max(self.cache.lengths) >= self.limit:  # the unread root of a row that has ended
            positions_BN = positions_BN.clamp(max=self.limit - 1)
        return self._run(tree.tokens_BN, positions_BN, tree.mask())

    def commit(self, tree: DraftTree, path_BL: torch.Tensor, counts_B: torch.Tensor, counts: list[int]) -> None:
        """Keep the first `counts` nodes of each row's path (the root first, -1 padded); forget all other nodes.

        Nodes behind the longest text there can be are not kept: they were verified in a row's last round, past its cut.
        """
        if tree.max_width > 1:  # a chain's accepted nodes lie in place
            self.cache.move_path(path_BL)
        room = [self.tokens - length for length in self.cache.lengths]
        counts_B = torch.minimum(counts_B, self.tokens - self.cache.lengths_B)
        self.cache.grow(counts_B, [min(pair) for pair in zip(counts, room, strict=True)])

    @torch.no_grad()
    def _run(
        self, ids_BN: torch.Tensor, positions_BN: torch.Tensor, ancestors_BNN: torch.Tensor, prefill: bool = False
    ) -> States:
        self.cache.begin(ids_BN.shape[1])
        masks = pass_masks(self.target, self.cache, ancestors_BNN, positions_BN)
        if self.lean is not None:
            return self.lean(ids_BN, positions_BN, masks, self.cache, self.taps, prefill)
        with self.target.capture(self.taps) as captured:
            output = self.target.decoder(
                input_ids=ids_BN,
                position_ids=positions_BN,
                attention_mask=masks,
                use_cache=True,
                **{self._cache_name: self.cache},
            )
        return States(output.last_hidden_state, captured)
