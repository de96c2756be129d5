"""What a trainer brings to the loop: a head, and how stored conversations become its batches. Shapes: K heads (or steps)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from data_prep.store import FeatureStore, StoredConversation
from eval.replay import Replayed
from heads.checkpoint import Head
from heads.errors import HeadwayError


class Method(Protocol):
    """What the loop asks of a trainer."""

    @property
    def head(self) -> Head:
        """The head to train."""

    @property
    def parent(self) -> str | None:
        """The trained head that it goes on from; None for a new one."""

    @property
    def weights(self) -> tuple[float, ...]:
        """[K]: of the heads' losses."""

    def batch(self, conversations: Sequence[StoredConversation]) -> dict[str, Tensor]:
        """Keyword arguments of the head's forward, on the CPU."""

    def counts(self, batch: dict[str, Tensor]) -> Tensor:
        """[K] int64: the rows each head's loss will sum over, known without the head."""

    def constants(self) -> dict[str, Any]:
        """Further keyword arguments of the head's forward, the same for every batch (a teacher)."""

    def replay(self, head: Head, conversations: Sequence[StoredConversation]) -> Replayed:
        """What decoding with `head`, this method's own or a copy of it, would accept of these texts."""

    def facts(self) -> dict[str, Any]:
        """What belongs into the manifest beside the loop's own entries."""


def require_served(method: Method, store: FeatureStore, rows: Sequence[int], kind: str) -> None:
    """Raise HeadwayError where no row of `rows`, the store's "training" or "validation" part, has a label of a head."""
    if any(method.counts(method.batch([store[row]])).any() for row in rows):
        return
    ids = ", ".join(store.conversation_ids[row] for row in rows[:5])
    raise HeadwayError(
        f"{store.folder}: none of the {len(rows)} {kind} conversations ({ids}, ...) has an assistant turn of two tokens or more; "
        "collect conversations with answers, and look at the loss mask"
    )
