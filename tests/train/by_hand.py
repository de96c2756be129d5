"""Figures of held-out conversations, counted one position after the other. Shapes: T positions, K heads (or steps)."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from torch import Tensor

from data_prep.store import FeatureStore, StoredConversation
from heads.medusa import MedusaHead


def held_out_rows(store: FeatureStore, count: int = 6) -> list[int]:
    order = sorted(range(len(store)), key=lambda row: sha256(store.conversation_ids[row].encode()).hexdigest())
    return sorted(order[:count])


def counted(drafted: Iterable[tuple[StoredConversation, Tensor]]) -> dict[str, list[Any]]:
    """Served rows, accuracy and conditional accuracy of three heads, whose ids [T, K] at every position are given."""
    served, correct, reached, accepted = ([0] * 3 for _ in range(4))
    for stored, ids_TK in drafted:
        for t in range(len(stored.ids_T)):
            prefix = True
            for k in range(3):
                turns = stored.turn_T[t + 1 : t + 3 + k].tolist()
                if len(turns) < k + 2 or turns[0] == 0 or len(set(turns)) > 1:
                    continue
                right = bool(ids_TK[t, k] == stored.ids_T[t + 2 + k])
                served[k] += 1
                correct[k] += right
                reached[k] += prefix
                prefix = prefix and right
                accepted[k] += prefix
    return {
        "rows": served,
        "accuracy": [c / s for c, s in zip(correct, served, strict=True)],
        "conditional": [a / max(1, r) for a, r in zip(accepted, reached, strict=True)],
    }


def walked(head: MedusaHead, stored: StoredConversation) -> list[int]:
    """Tokens of every round, by drafting at each root and stepping on by what was right and one more."""
    emitted, ids, turns = [], stored.ids_T.tolist(), stored.turn_T.tolist()
    for turn in sorted(set(turns) - {0}):
        root, end = turns.index(turn), len(turns) - turns[::-1].index(turn)
        while root + 1 < end:
            drafts = head.draft_ids(stored.last_TH[root - 1 : root])[0].tolist()
            right = 0
            while right < len(drafts) and root + 1 + right < end and drafts[right] == ids[root + 1 + right]:
                right += 1
            emitted.append(min(right + 1, end - root - 1))
            root += emitted[-1]
    return emitted
