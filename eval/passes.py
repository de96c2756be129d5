"""Passes of the target over its slot cache: the prefill and the verification of a tree.

Shapes: B rows, T positions, N tree nodes, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from eval.cache import SlotCache
from eval.masks import check_supported, pass_masks
from eval.tree import DraftTree
from heads.errors import HeadwayError
from heads.target import States, Target


class TargetPasses:
    """The target with a cache for `rows` sequences of up to `capacity` tokens, nodes of the running pass included.

    Raises HeadwayError for a target that cannot take back a rejected draft, or a capacity past its position limit.
    """

    def __init__(self, target: Target, rows: int, capacity: int, taps: Sequence[int] = ()) -> None:
        check_supported(target)
        if capacity > target.max_positions:
            raise HeadwayError(
                f"target '{target.name}' has {target.max_positions} positions, {capacity} are asked for (prompt, new "
                "tokens and draft together); shorten the prompt or lower max_new_tokens"
            )
        self.target, self.taps = target, tuple(taps)
        self.cache = SlotCache(target.num_layers, rows, capacity, target.device)
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
        states = self._run(ids_BT, positions_BT, ancestors_BTT)
        self.cache.grow(torch.tensor(lengths, device=device), lengths)
        return ids_BT, states

    def verify(self, tree: DraftTree) -> States:
        """One pass over a tree's nodes: states [B, N, H]. Nothing is committed."""
        positions_BN = self.cache.lengths_B[:, None] + tree.positions()
        return self._run(tree.tokens_BN, positions_BN, tree.mask())

    def commit(self, tree: DraftTree, path_BL: torch.Tensor, counts_B: torch.Tensor, counts: list[int]) -> None:
        """Keep the first `counts` nodes of each row's path (the root first, -1 padded); forget all other nodes."""
        if tree.max_width > 1:  # a chain's accepted nodes lie in place
            self.cache.move_path(path_BL)
        self.cache.grow(counts_B, counts)

    @torch.no_grad()
    def _run(self, ids_BN: torch.Tensor, positions_BN: torch.Tensor, ancestors_BNN: torch.Tensor) -> States:
        self.cache.begin(ids_BN.shape[1])
        masks = pass_masks(self.target, self.cache, ancestors_BNN, positions_BN)
        with self.target.capture(self.taps) as captured:
            output = self.target.decoder(
                input_ids=ids_BN,
                position_ids=positions_BN,
                attention_mask=masks,
                use_cache=True,
                **{self._cache_name: self.cache},
            )
        return States(output.last_hidden_state, captured)
