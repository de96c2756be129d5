"""What an artifact of ours says about a head and its target beside the weights, so that a later change can be named.

Shapes: D draft vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from torch import Tensor

from heads.checkpoint import Head
from heads.mapped import MappedHead


def head_facts(head: Head) -> dict[str, Any]:
    """`config`: as the head was trained; `map_sha256`: of the target ids that it drafts, where they are not all of them."""
    facts: dict[str, Any] = {"config": {"kind": head.config.kind, **asdict(head.config)}}
    if isinstance(head, MappedHead) and head.config.mapped:
        facts["map_sha256"] = map_sha256(head.target_ids())
    return facts


def map_sha256(ids_D: Tensor) -> str:
    """Hex SHA-256 of target ids in the order of their draft ids, as little-endian int64."""
    return hashlib.sha256(ids_D.cpu().numpy().astype("<i8").tobytes()).hexdigest()
