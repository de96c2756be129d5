"""What is measured against the baseline: drafters by name, heads and draft models by folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eval.adaptive import LengthController
from eval.drafters import Drafter, lookahead, lookup, model, suffix
from eval.drafters.lookahead import LookaheadDrafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.medusa import MedusaDrafter, MedusaTreeDrafter, read_tree
from eval.drafters.model import ModelDrafter
from eval.drafters.none import NoDrafter
from eval.drafters.suffix import SuffixDrafter
from heads import load_head
from heads.checkpoint import Head, read_manifest
from heads.errors import HeadwayError
from heads.medusa import Embed, MedusaHead
from heads.target import Target, fingerprint, resolve

BASELINE, LOOKUP = "none", "lookup"
MODEL, MEDUSA_TREE = "model", "medusa-tree"
ADAPTIVE = "adaptive"  # before a colon and any other name: a controller sets the length of its drafts
PREFIXES = (MODEL, MEDUSA_TREE)  # before a colon and a folder; a folder alone is a head, drafting as its kind does


def _given(draft_length: int | None, default: int) -> int:
    return default if draft_length is None else draft_length


# Drafters that need no folder, from the draft length asked for (None: their own). `suffix` knows its own text alone;
# `suffix-shared` remembers earlier outputs too, so where a prompt is decoded more than once it is told the answer.
PLAIN: dict[str, Callable[[int | None], Drafter]] = {
    BASELINE: lambda _: NoDrafter(),
    LOOKUP: lambda length: LookupDrafter(_given(length, lookup.DRAFT_LENGTH)),
    "suffix": lambda length: SuffixDrafter(_given(length, suffix.DRAFT_LENGTH), remembered=0),
    "suffix-shared": lambda length: SuffixDrafter(_given(length, suffix.DRAFT_LENGTH)),
    "lookahead": lambda length: LookaheadDrafter(ngram=1 + _given(length, lookahead.NGRAM - 1)),
}
NAMES = f"a head's folder, {', '.join(f'{prefix}:FOLDER' for prefix in PREFIXES)}, {', '.join(PLAIN)}, {ADAPTIVE}:NAME"
# A head's kind -> its drafter, from the loaded head and the draft length asked for (None: all it has).
HEAD_DRAFTERS: dict[str, Callable[[Any, int | None, Embed], Drafter]] = {"medusa": MedusaDrafter}


@dataclass(frozen=True)
class Contender:
    """A drafter under the name it was asked for; `head` is its folder, None without one, `controller` sets its lengths."""

    name: str
    drafter: Drafter
    head: str | None
    controller: LengthController | None = None


def build(name: str, target: Target, draft_length: int | None) -> Contender:
    """A contender for `target`, in its dtype and on its device, by a name as NAMES lists them.

    Raises HeadwayError for a name that is none of these, a head or draft model that does not fit the target, and a draft
    length that the drafter cannot give.
    """
    if name.startswith(f"{ADAPTIVE}:"):
        fixed = build(_without_adaptive(name), target, draft_length)
        if isinstance(fixed.drafter, NoDrafter | LookaheadDrafter):
            raise HeadwayError(f"{name}: '{fixed.name}' has no draft length to choose; leave out '{ADAPTIVE}:'")
        return replace(fixed, name=name, controller=LengthController(fixed.drafter.depth))
    prefix, folder = _split(name)
    if name in PLAIN:
        return Contender(name, PLAIN[name](draft_length), None)
    if prefix == MODEL:
        draft = Target.load(folder, str(target.dtype).removeprefix("torch."), str(target.device))
        return Contender(name, ModelDrafter(draft, target, _given(draft_length, model.DRAFT_LENGTH)), folder)
    head = _fitting_head(folder, target)
    if prefix == MEDUSA_TREE:
        if not isinstance(head, MedusaHead):
            raise HeadwayError(f"{name}: a head of kind '{head.config.kind}'; only Medusa heads draft with such a tree")
        return Contender(name, MedusaTreeDrafter(head, read_tree(folder), draft_length), folder)
    kind = head.config.kind
    if kind not in HEAD_DRAFTERS:
        raise HeadwayError(f"{name}: no drafter for heads of kind '{kind}'; known: {', '.join(HEAD_DRAFTERS)}")
    return Contender(name, HEAD_DRAFTERS[kind](head, draft_length, target.embed), folder)


def check_name(name: str) -> None:
    """Raise HeadwayError for a name that is no drafter's and no head's folder."""
    name = _without_adaptive(name)
    prefix, folder = _split(name)
    if prefix == MODEL:
        resolve(folder)
    elif name not in PLAIN and not Path(folder).is_dir():
        raise HeadwayError(f"{folder}: no such folder; train a head (make demo), or give --head {NAMES}")


def fits(name: str, target: Target) -> str | None:
    """None where the head was trained for this target (or `name` is no head), else one line that names both."""
    name = _without_adaptive(name)
    prefix, folder = _split(name)
    if name in PLAIN or prefix == MODEL:
        return None
    trained = read_manifest(folder).get("target", {})
    if trained.get("fingerprint") == target.fingerprint:
        return None
    return (
        f"{name}: trained for target '{trained.get('name')}' ({str(trained.get('fingerprint'))[:16]}), not for "
        f"'{target.name}' ({target.fingerprint[:16]})"
    )


def origin(name: str) -> dict[str, Any] | None:
    """What a contender was made from, for the report: a head's manifest, a draft model's fingerprint, None for the rest."""
    name = _without_adaptive(name)
    prefix, folder = _split(name)
    if name in PLAIN:
        return None
    if prefix == MODEL:
        return {"kind": "draft model", "fingerprint": fingerprint(resolve(folder))}
    return read_manifest(folder)


def _without_adaptive(name: str) -> str:
    return name.removeprefix(f"{ADAPTIVE}:")


def _split(name: str) -> tuple[str | None, str]:
    """(prefix, folder); the prefix is None for a name without one of PREFIXES."""
    prefix, colon, folder = name.partition(":")
    return (prefix, folder) if colon and prefix in PREFIXES else (None, name)


def _fitting_head(folder: str, target: Target) -> Head:
    head = load_head(folder, device=target.device, dtype=target.dtype)
    shape = asdict(head.config)
    for key, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if shape.get(key, ours) != ours:
            raise HeadwayError(
                f"{folder}: its {key} is {shape[key]}, that of target '{target.name}' {ours}; they must fit"
            )
    return head
