"""What a feature store keeps of conversations, from one pass of the frozen target over a batch of them.

Shapes: B rows, T positions, R rows whose next token is supervised, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from data_prep.plan import Planned
from data_prep.store import StoredConversation
from heads.errors import HeadwayError
from heads.target import Target

LOGIT_ELEMENTS = 2**24  # fp32 logits held at a time: 64 MB, whatever the vocabulary


def run_target(
    target: Target, batch: Sequence[Planned], taps: Sequence[int], dtype: torch.dtype
) -> list[StoredConversation]:
    """One forward pass over right-padded rows; what the store keeps of each, states in `dtype`, on the CPU.

    Raises HeadwayError naming the conversation when a state or a log-sum-exp is not finite.
    """
    ids_BT = pad_sequence([row.ids_T.long() for row in batch], batch_first=True)
    turn_BT = pad_sequence([row.turn_T for row in batch], batch_first=True)  # padding: turn 0, never supervised
    lengths_B = torch.tensor([row.entry.length for row in batch])
    real_BT = torch.arange(ids_BT.shape[1]) < lengths_B[:, None]
    states = target.states(ids_BT.to(target.device), real_BT.long().to(target.device), taps)
    last_BTH = states.last.to(dtype)
    taps_BTH = {tap: states.taps[tap].to(dtype) for tap in taps}
    served_BT = torch.zeros_like(real_BT)
    served_BT[:, :-1] = turn_BT[:, 1:] > 0
    served_BT = served_BT.to(target.device)
    top1_R, lse_R = _teacher(target, last_BTH[served_BT])
    top1_BT = torch.full(served_BT.shape, -1, device=target.device)
    lse_BT = torch.zeros(served_BT.shape, device=target.device)
    top1_BT[served_BT], lse_BT[served_BT] = top1_R, lse_R
    finite_BT = lse_BT.isfinite()
    for states_BTH in (last_BTH, *taps_BTH.values()):
        finite_BT &= states_BTH.isfinite().all(-1)
    _refuse_bad(batch, ~finite_BT.cpu() & real_BT, target)
    last_BTH, top1_BT, lse_BT = last_BTH.cpu(), top1_BT.cpu(), lse_BT.cpu()
    taps_BTH = {tap: states_BTH.cpu() for tap, states_BTH in taps_BTH.items()}
    return [
        StoredConversation(
            id=row.entry.id,
            ids_T=row.ids_T,
            turn_T=row.turn_T,
            last_TH=last_BTH[index, : row.entry.length],
            taps={tap: states_BTH[index, : row.entry.length] for tap, states_BTH in taps_BTH.items()},
            top1_T=top1_BT[index, : row.entry.length],
            lse_T=lse_BT[index, : row.entry.length],
        )
        for index, row in enumerate(batch)
    ]


@torch.no_grad()
def _teacher(target: Target, last_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax (int64 [R]) and fp32 log-sum-exp [R] of the logits that these stored states give."""
    top1, lse = [], []
    for chunk_RH in last_RH.to(target.dtype).split(max(1, LOGIT_ELEMENTS // target.vocab_size)):
        logits_RV = target.logits(chunk_RH).float()
        top1.append(logits_RV.argmax(-1))
        lse.append(logits_RV.logsumexp(-1))
    return torch.cat(top1), torch.cat(lse)


def _refuse_bad(batch: Sequence[Planned], bad_BT: torch.Tensor, target: Target) -> None:
    for row, bad_T in zip(batch, bad_BT, strict=True):
        if bad_T.any():
            kind = str(target.dtype).removeprefix("torch.")
            remedy = "with --dtype bfloat16 or float32" if target.dtype == torch.float16 else "with another target"
            raise HeadwayError(
                f"conversation {row.entry.id}, token {int(bad_T.int().argmax())}: the states of target '{target.name}' "
                f"are not finite in {kind}; collect {remedy} into a new --out"
            )
