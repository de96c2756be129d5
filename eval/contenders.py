"""What is measured against the baseline: drafters by name, and heads by folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.drafters import Drafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.medusa import MedusaDrafter
from eval.drafters.none import NoDrafter
from heads import load_head
from heads.checkpoint import read_manifest
from heads.errors import HeadwayError
from heads.target import Target

BASELINE, LOOKUP = "none", "lookup"
PLAIN = (BASELINE, LOOKUP)  # drafters that need no head
# A head's kind -> its drafter, from the loaded head and the draft length asked for (None: all it has).
HEAD_DRAFTERS: dict[str, Callable[[Any, int | None], Drafter]] = {"medusa": MedusaDrafter}


@dataclass(frozen=True)
class Contender:
    """A drafter under the name it was asked for; `head` is its folder, None without one."""

    name: str
    drafter: Drafter
    head: str | None


def build(name: str, target: Target, draft_length: int | None) -> Contender:
    """A contender for `target`, in its dtype and on its device: `none`, `lookup`, or the folder of a head.

    Raises HeadwayError for a name that is neither, and for a draft length that the drafter cannot give.
    """
    if name == BASELINE:
        return Contender(name, NoDrafter(), None)
    if name == LOOKUP:
        return Contender(name, LookupDrafter() if draft_length is None else LookupDrafter(draft_length), None)
    head = load_head(name, device=target.device, dtype=target.dtype)
    kind, shape = head.config.kind, asdict(head.config)
    if kind not in HEAD_DRAFTERS:
        raise HeadwayError(f"{name}: no drafter for heads of kind '{kind}'; known: {', '.join(HEAD_DRAFTERS)}")
    for key, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if shape.get(key, ours) != ours:
            raise HeadwayError(
                f"{name}: its {key} is {shape[key]}, that of target '{target.name}' {ours}; they must fit"
            )
    return Contender(name, HEAD_DRAFTERS[kind](head, draft_length), name)


def check_name(name: str) -> None:
    """Raise HeadwayError for a name that is no drafter's and no head's folder."""
    if name not in PLAIN and not Path(name).is_dir():
        raise HeadwayError(
            f"{name}: no such folder; train a head (make demo), or give --head a head's folder or {' or '.join(PLAIN)}"
        )


def fits(name: str, target: Target) -> str | None:
    """None where the head was trained for this target (or `name` is no head), else one line that names both."""
    if name in PLAIN:
        return None
    trained = read_manifest(name).get("target", {})
    if trained.get("fingerprint") == target.fingerprint:
        return None
    return (
        f"{name}: trained for target '{trained.get('name')}' ({str(trained.get('fingerprint'))[:16]}), not for "
        f"'{target.name}' ({target.fingerprint[:16]})"
    )
