"""What is measured against the baseline: drafters by name, heads and draft models by folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from eval.adaptive import LengthController
from eval.drafters import Drafter, eagle, lookahead, lookup, model, suffix
from eval.drafters.dynamic_tree import DynamicTreeDrafter, TreeSize
from eval.drafters.eagle import EagleDrafter, EagleTreeDrafter
from eval.drafters.eagle_passes import TargetFunctions
from eval.drafters.lookahead import LookaheadDrafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.medusa import MedusaDrafter, MedusaTreeDrafter, read_tree
from eval.drafters.model import ModelDrafter
from eval.drafters.none import NoDrafter
from eval.drafters.suffix import SuffixDrafter
from eval.lean import lean_decoder
from eval.tree import TreeShape
from heads import load_head
from heads.checkpoint import Head, read_manifest
from heads.eagle import EagleHead
from heads.errors import HeadwayError
from heads.hub import resolve_head
from heads.medusa import MedusaHead
from heads.target import Target, fingerprint, resolve

BASELINE, LOOKUP = "none", "lookup"
MODEL, MEDUSA_TREE = "model", "medusa-tree"
EAGLE_TREE, EAGLE_STATIC = "eagle-tree", "eagle-static"
CPU_TREE = TreeSize(k=3, total=10, depth=4)  # on a GPU a pass over 60 tokens costs what one does, on a CPU it does not
ADAPTIVE = "adaptive"  # before a colon and any other name: a controller sets the length of its drafts
# Before a colon and a folder; a folder alone is a head, drafting a chain. The size of a dynamic tree may stand behind its
# name: eagle-tree,k=4,total=24,depth=5:FOLDER
PREFIXES = (MODEL, MEDUSA_TREE, EAGLE_TREE, EAGLE_STATIC)


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
NAMES = f"a head's folder or Hub id, {', '.join(f'{prefix}:FOLDER' for prefix in PREFIXES)}, {', '.join(PLAIN)}, {ADAPTIVE}:NAME"


def _medusa(head: MedusaHead, target: Target, draft_length: int | None) -> Drafter:
    return MedusaDrafter(head, draft_length, target.embed)


def _eagle(head: EagleHead, target: Target, draft_length: int | None) -> Drafter:
    length = _given(draft_length, eagle.DRAFT_LENGTH)
    return EagleDrafter(head, _functions(target), length, compiled=_compiled(target))


# A head's kind -> its drafter, from the loaded head, the target and the draft length asked for (None: its own).
HEAD_DRAFTERS: dict[str, Callable[[Any, Target, int | None], Drafter]] = {
    "medusa": _medusa,
    "eagle": _eagle,
    "eagle3": _eagle,
}


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
    if prefix is not None:
        return Contender(name, _tree_drafter(name, head, target, draft_length), folder)
    kind = head.config.kind
    if kind not in HEAD_DRAFTERS:
        raise HeadwayError(f"{name}: no drafter for heads of kind '{kind}'; known: {', '.join(HEAD_DRAFTERS)}")
    return Contender(name, HEAD_DRAFTERS[kind](head, target, draft_length), folder)


def static_tree(head: MedusaHead | EagleHead, target: Target, shape: TreeShape, draft_length: int | None) -> Drafter:
    """A drafter of one fixed tree, without the nodes deeper than the draft length."""
    if isinstance(head, MedusaHead):
        return MedusaTreeDrafter(head, shape, draft_length)
    return EagleTreeDrafter(head, _functions(target), shape, draft_length, _compiled(target))


def _tree_drafter(name: str, head: Head, target: Target, draft_length: int | None) -> Drafter:
    prefix, folder = _split(name)
    if (prefix == MEDUSA_TREE and isinstance(head, MedusaHead)) or (
        prefix == EAGLE_STATIC and isinstance(head, EagleHead)
    ):
        return static_tree(head, target, read_tree(folder), draft_length)
    if prefix == EAGLE_TREE and isinstance(head, EagleHead):
        size = _tree_size(name, CPU_TREE if target.device.type == "cpu" else TreeSize())
        size = replace(size, depth=_given(draft_length, size.depth))
        return DynamicTreeDrafter(head, _functions(target), size, _compiled(target))
    wanted = "Medusa" if prefix == MEDUSA_TREE else "EAGLE"
    raise HeadwayError(f"{name}: a head of kind '{head.config.kind}'; only {wanted} heads draft with such a tree")


def _functions(target: Target) -> TargetFunctions:
    return TargetFunctions(target.embed, target.logits)


def _compiled(target: Target) -> bool:
    """Draft steps are compiled where the target's layers are (eval.lean.compile_target)."""
    lean = lean_decoder(target)
    return lean is not None and lean.compiled


def check_name(name: str) -> None:
    """Raise HeadwayError for a name that is no drafter's, no head's folder and no head's on the Hub."""
    name = _without_adaptive(name)
    prefix, folder = _split(name)
    _tree_size(name, TreeSize())
    if prefix == MODEL:
        resolve(folder)
    elif name not in PLAIN:
        try:
            resolve_head(folder)
        except HeadwayError as error:
            raise HeadwayError(f"{error}; train a head (make demo), or give --head {NAMES}") from error


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
    front, colon, folder = name.partition(":")
    prefix = front.partition(",")[0]
    return (prefix, folder) if colon and prefix in PREFIXES else (None, name)


def _tree_size(name: str, usual: TreeSize) -> TreeSize:
    """The size that a dynamic tree's name asks for; what it leaves open is as usual. Raises HeadwayError for other options."""
    prefix, _ = _split(name)
    front, _, _ = name.partition(":")
    options = front.split(",")[1:] if prefix is not None else []
    asked: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if prefix != EAGLE_TREE or key not in TreeSize.__dataclass_fields__ or not value.isdecimal():
            raise HeadwayError(
                f"{name}: '{option}' is no option; only {EAGLE_TREE},k=4,total=24,depth=5:FOLDER has some"
            )
        asked[key] = int(value)
    return replace(usual, **asked)


def _fitting_head(folder: str, target: Target) -> Head:
    head = load_head(folder, device=target.device, dtype=target.dtype)
    shape = asdict(head.config)
    for key, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if shape.get(key, ours) != ours:
            raise HeadwayError(
                f"{folder}: its {key} is {shape[key]}, that of target '{target.name}' {ours}; they must fit"
            )
    return head
