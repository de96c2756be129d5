"""Attention masks of a pass: which slots each node may see; and which targets can be decoded with them.

Shapes: B rows, N nodes, C slots in view. A node sees its row's committed slots, its ancestors and itself; in a layer
with a sliding window only those less than `window` positions back, in a chunked layer only those of its own chunk.
"""

from __future__ import annotations

import inspect

import torch

from eval.cache import SlotCache
from heads.errors import HeadwayError
from heads.target import Target

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# what each kind of layer needs from the config to be masked
_SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}


def check_supported(target: Target) -> None:
    """Raises HeadwayError, naming target and reason, if a draft cannot be verified and taken back exactly."""
    reason = _refusal(target)
    if reason is not None:
        raise HeadwayError(f"target '{target.name}' ({target.config.model_type}): {reason}; choose another target")


def _refusal(target: Target) -> str | None:
    config, kinds = target.config, layer_kinds(target)
    odd = sorted(kinds - {FULL, SLIDING, CHUNKED})
    layers = f" (layers of type {', '.join(odd)})" if odd else ""
    if getattr(type(target.model), "_is_stateful", False):
        return f"it keeps a recurrent state{layers}, which cannot take back a rejected draft"
    if odd:
        return f"no mask or rollback is known for its layers of type {', '.join(odd)}"
    if target.model.config.is_encoder_decoder:
        return "it is an encoder-decoder, and only decoders are decoded here"
    for kind in kinds & set(_SIZES):
        if not getattr(config, _SIZES[kind], None):
            return f"it has layers of type {kind} but its config gives no {_SIZES[kind]}"
    if "position_ids" not in inspect.signature(type(target.decoder).forward).parameters:
        return "its decoder takes no position_ids, so a draft's nodes cannot be told where they stand"
    if getattr(config, "alibi", False):
        return "its attention is biased by slot (ALiBi), not by position"
    if any(buffer.dtype == torch.bool and buffer.ndim == 4 for buffer in target.layers.buffers()):
        return "its attention keeps a causal mask of its own, by slot and not by position"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention implementation '{config._attn_implementation}' takes no mask; load it with sdpa or eager"
    return None


def layer_kinds(target: Target) -> set[str]:
    """The kinds of attention in the target's layers, by transformers' names; the same reading of a config as there."""
    kinds = getattr(target.config, "layer_types", None)
    if kinds:
        return set(kinds)
    for kind, size in _SIZES.items():
        if getattr(target.config, size, None) is not None:
            return {kind}
    return {FULL}


def position_limit(target: Target) -> int:
    """How many positions can be decoded: the target's own, or those before its rope changes its frequencies.

    longrope takes a pass's frequencies by the longest row, so past that point a row's tokens would depend on its
    neighbours and on the draft, and keys in the cache would no longer fit.
    """
    limit = target.max_positions
    rope = getattr(target.config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            limit = min(limit, int(part["original_max_position_embeddings"]))
    return limit


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
    node_B1C = (slots_C - start_B11).clamp(0, ancestors_BNN.shape[2] - 1)
    in_pass_B1C = (slots_C >= start_B11) & (slots_C < start_B11 + ancestors_BNN.shape[2])
    ancestors_BNC = ancestors_BNN.gather(2, node_B1C.expand(-1, ancestors_BNN.shape[1], -1))
    full_BNC = committed_B1C | (in_pass_B1C & ancestors_BNC)
    kinds = layer_kinds(target)
    masks = {FULL: full_BNC}
    if kinds != {FULL}:
        # a committed token's slot is its position; a node's position is its row's length plus its depth
        position_B1C = torch.where(committed_B1C, slots_C, positions_BN.gather(1, node_B1C[:, 0])[:, None])
        query_BN1 = positions_BN[:, :, None]
        if SLIDING in kinds:
            masks[SLIDING] = full_BNC & (position_B1C > query_BN1 - target.config.sliding_window)
        if CHUNKED in kinds:
            size = target.config.attention_chunk_size
            masks[CHUNKED] = full_BNC & (position_B1C // size == query_BN1 // size)
    finished = {kind: _finish(target, masks[kind]) for kind in sorted(kinds)}
    # decoders with one kind of layer take the mask itself; those that mix kinds take one a kind
    return finished if len(finished) > 1 else next(iter(finished.values()))


def _finish(target: Target, visible_BNC: torch.Tensor) -> torch.Tensor:
    mask_B1NC = visible_BNC[:, None]
    if target.config._attn_implementation != "eager":
        return mask_B1NC
    lowest = torch.finfo(target.dtype).min
    return torch.zeros_like(mask_B1NC, dtype=target.dtype).masked_fill(~mask_B1NC, lowest)
