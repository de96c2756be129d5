"""What a feature store keeps of conversations, from one pass of the frozen target over a batch of them.

Shapes: B rows, T positions, R rows whose next token is supervised, H hidden, K top-k logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from data_prep.plan import Planned
from data_prep.shards import StoredConversation
from heads.errors import HeadwayError
from heads.target import Target

LOGIT_ELEMENTS = 2**24  # fp32 logits held at a time: 64 MB, whatever the vocabulary
FILLED = {"top1_T": -1, "lse_T": 0.0, "top_k_ids_TK": -1, "top_k_logits_TK": 0.0}  # where nothing is served


def run_target(
    target: Target,
    batch: Sequence[Planned],
    taps: Sequence[int],
    dtype: torch.dtype,
    *,
    tap_dtype: torch.dtype | None = None,
    top_k: int = 0,
) -> list[StoredConversation]:
    """One forward pass over right-padded rows; what the store keeps of each, on the CPU: the last state in `dtype`, taps in
    `tap_dtype` (None: that too), the `top_k` largest logits.

    Raises HeadwayError naming the conversation when a state or a log-sum-exp is not finite.
    """
    ids_BT = pad_sequence([row.ids_T.long() for row in batch], batch_first=True)
    turn_BT = pad_sequence([row.turn_T for row in batch], batch_first=True)  # padding: turn 0, never supervised
    lengths_B = torch.tensor([row.entry.length for row in batch])
    real_BT = torch.arange(ids_BT.shape[1]) < lengths_B[:, None]
    states = target.states(ids_BT.to(target.device), real_BT.long().to(target.device), taps)
    last_BTH = states.last.to(dtype)
    taps_BTH = {tap: states.taps[tap].to(tap_dtype or dtype) for tap in taps}
    served_BT = torch.zeros_like(real_BT)
    served_BT[:, :-1] = turn_BT[:, 1:] > 0
    served_BT = served_BT.to(target.device)
    teacher = _teacher(target, last_BTH[served_BT], top_k)
    laid_out = {name: _lay_out(served_BT, found, FILLED[name]) for name, found in teacher.items()}
    finite_BT = laid_out["lse_T"].isfinite()
    for states_BTH in (last_BTH, *taps_BTH.values()):
        finite_BT &= states_BTH.isfinite().all(-1)
    _refuse_bad(batch, ~finite_BT.cpu() & real_BT, target)
    last_BTH = last_BTH.cpu()
    taps_BTH = {tap: states_BTH.cpu() for tap, states_BTH in taps_BTH.items()}
    laid_out = {name: tensor.cpu() for name, tensor in laid_out.items()}
    return [
        StoredConversation(
            id=row.entry.id,
            ids_T=row.ids_T,
            turn_T=row.turn_T,
            last_TH=last_BTH[index, : row.entry.length],
            taps={tap: states_BTH[index, : row.entry.length] for tap, states_BTH in taps_BTH.items()},
            **{name: tensor[index, : row.entry.length] for name, tensor in laid_out.items()},
        )
        for index, row in enumerate(batch)
    ]


@torch.no_grad()
def _teacher(target: Target, last_RH: torch.Tensor, top_k: int) -> dict[str, torch.Tensor]:
    """Argmax (int64 [R]) and fp32 log-sum-exp [R] of the logits that these stored states give, and where asked for the
    largest ones with their ids [R, K]."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in FILLED if top_k or "top_k" not in name}
    for chunk_RH in last_RH.to(target.dtype).split(max(1, LOGIT_ELEMENTS // target.vocab_size)):
        logits_RV = target.logits(chunk_RH).float()
        found["top1_T"].append(logits_RV.argmax(-1))
        found["lse_T"].append(logits_RV.logsumexp(-1))
        if top_k:
            largest_RK = logits_RV.topk(top_k)
            found["top_k_logits_TK"].append(largest_RK.values)
            found["top_k_ids_TK"].append(largest_RK.indices)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _lay_out(served_BT: torch.Tensor, found_R: torch.Tensor, filled: float) -> torch.Tensor:
    """Values of the served positions [R, ...] -> [B, T, ...], `filled` elsewhere."""
    laid_out = found_R.new_full((*served_BT.shape, *found_R.shape[1:]), filled)
    laid_out[served_BT] = found_R
    return laid_out


def _refuse_bad(batch: Sequence[Planned], bad_BT: torch.Tensor, target: Target) -> None:
    for row, bad_T in zip(batch, bad_BT, strict=True):
        if bad_T.any():
            kind = str(target.dtype).removeprefix("torch.")
            remedy = "with --dtype bfloat16 or float32" if target.dtype == torch.float16 else "with another target"
            raise HeadwayError(
                f"conversation {row.entry.id}, token {int(bad_T.int().argmax())}: the states of target '{target.name}' "
                f"are not finite in {kind}; collect {remedy} into a new --out"
            )
