"""Attention masks of a pass: which slots each node may see.

Shapes: B rows, N nodes, C slots in view. A node sees its row's committed slots, its ancestors and itself; in a layer
with a sliding window only those less than `window` positions back.
"""

from __future__ import annotations

import torch

from eval.cache import SlotCache
from heads.errors import HeadwayError
from heads.target import Target

FULL, SLIDING = "full_attention", "sliding_attention"


def check_supported(target: Target) -> None:
    """Raises HeadwayError for a target whose layers cannot roll back or follow a mask we do not build."""
    for kind in sorted(set(getattr(target.config, "layer_types", None) or [FULL])):
        if kind not in (FULL, SLIDING):
            raise HeadwayError(
                f"target '{target.name}' ({target.config.model_type}): its layers of type '{kind}' cannot take back a "
                "rejected draft; speculative decoding needs attention layers with a key-value cache"
            )


def pass_masks(
    target: Target, cache: SlotCache, ancestors_BNN: torch.Tensor, positions_BN: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask(s) for the pass that `cache.begin` prepared, as the target's decoder takes them.

    ancestors_BNN[b, n, m] is True where node m is node n or its ancestor. Returns one mask [B, 1, N, C] (bool, True =
    visible; additive for eager attention), or one a layer type where the target mixes types.
    """
    slots_C = torch.arange(cache.view, device=positions_BN.device)
    start_B11 = cache.lengths_B[:, None, None]
    committed_B1C = slots_C < start_B11
    node_B1C = (slots_C - start_B11).clamp(0, ancestors_BNN.shape[2] - 1).expand(-1, ancestors_BNN.shape[1], -1)
    in_pass_B1C = (slots_C >= start_B11) & (slots_C < start_B11 + ancestors_BNN.shape[2])
    full_BNC = committed_B1C | (in_pass_B1C & ancestors_BNN.gather(2, node_B1C))

    kinds = getattr(target.config, "layer_types", None)
    window = getattr(target.config, "sliding_window", None)
    if kinds is None:
        kinds = [SLIDING if window is not None else FULL]
    if SLIDING not in kinds:
        return _finish(target, full_BNC)
    # a committed token's slot is its position; a node's position is its row's length plus its depth
    slot_position_BNC = torch.where(committed_B1C, slots_C, positions_BN.gather(1, node_B1C[:, 0])[:, None])
    sliding_BNC = full_BNC & (positions_BN[:, :, None] - slot_position_BNC < window)
    if FULL not in kinds:
        return _finish(target, sliding_BNC)
    return {FULL: _finish(target, full_BNC), SLIDING: _finish(target, sliding_BNC)}


def _finish(target: Target, visible_BNC: torch.Tensor) -> torch.Tensor:
    mask_B1NC = visible_BNC[:, None]
    if target.config._attn_implementation != "eager":
        return mask_B1NC
    lowest = torch.finfo(target.dtype).min
    return torch.zeros_like(mask_B1NC, dtype=target.dtype).masked_fill(~mask_B1NC, lowest)
