"""All layouts: read whatever a folder holds, write a head for an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import MANIFEST, Head, load_head, save_head
from heads.errors import HeadwayError, sha256_file
from heads.formats import eagle1_raw, eagle3_raw, eagle3_speculators, medusa_engine, medusa_original
from heads.formats.files import (
    CONFIG,
    DTYPES,
    PROVENANCE,
    WEIGHTS,
    Foreign,
    cast,
    check_finite,
    check_free,
    dtype_name,
    json_text,
    read_foreign,
    write_folder,
)
from heads.formats.layout import SGLANG, VLLM, Layout, TargetFacts
from heads.formats.recognise import HEADWAY, recognise
from heads.formats.serving import SERVING, VLLM_MEDUSA, Command, serving_commands, serving_text
from heads.hub import resolve_head
from heads.medusa import MedusaHead
from heads.provenance import head_facts

LAYOUTS = {
    module.LAYOUT.name: module.LAYOUT
    for module in (eagle3_raw, eagle3_speculators, eagle1_raw, medusa_original, medusa_engine)
}
SPECULATORS, MEDUSA = "speculators", "medusa"
WRITTEN: dict[str, dict[str, Layout]] = {
    VLLM: {"eagle3": eagle3_raw.LAYOUT, "eagle": eagle1_raw.LAYOUT, "medusa": medusa_engine.LAYOUT},
    SGLANG: {"eagle3": eagle3_raw.LAYOUT, "eagle": eagle1_raw.LAYOUT},
    SPECULATORS: {"eagle3": eagle3_speculators.LAYOUT},
    MEDUSA: {"medusa": medusa_original.LAYOUT},
}
"""What `--to` writes for a head of each kind."""
DRAFT_TOKENS = 4
HUB_FILES = (CONFIG, MANIFEST, PROVENANCE, *WEIGHTS, "model-*-of-*.safetensors", "pytorch_model-*-of-*.bin")
"""What is fetched of a repository that holds a head in whatever layout, shards included."""


@dataclass(frozen=True)
class Read:
    """A head and where it comes from: `notes` are what its reader had to decide."""

    head: Head
    layout: str
    target: TargetFacts
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Written:
    """What an export left: the layout, how it is served, the commands that do it, what the person should know."""

    layout: str
    draft_tokens: int
    dtype: str
    commands: tuple[Command, ...]
    notes: tuple[str, ...]


def read_head(folder: Path, target: str | None = None, taps: tuple[int, ...] | None = None) -> Read:
    """The head in `folder`, or of that name on the Hub, in whatever layout; `target` null: the one that its manifest names.

    Raises HeadwayError for a folder that holds no known layout, a target that does not fit, and all that readers refuse.
    """
    folder = resolve_head(folder, files=HUB_FILES)
    layout = recognise(folder)
    if layout is None:
        raise HeadwayError(f"{folder}: no head of a layout that is known: {HEADWAY}, {', '.join(LAYOUTS)}")
    if layout == HEADWAY:
        head = load_head(folder)
        facts = _target(folder, target, head.manifest)
        check_finite(head.state_dict(), folder, "the head is damaged: train or copy it again")
        return Read(head, layout, facts, _other_target(head.manifest, facts))
    foreign = read_foreign(folder)
    manifest = _provenance(folder)
    facts = _target(folder, target, manifest)
    head = LAYOUTS[layout].read(foreign, facts, taps)
    head.manifest = manifest or _imported(foreign, layout, facts)
    return Read(head, layout, facts, (*foreign.notes, *_other_target(manifest, facts)))


def export_head(
    head: Head, target: TargetFacts, to: str, out: Path, dtype: str = "auto", draft_tokens: int | None = None
) -> Written:
    """Write `head` to `out`, new or empty, which appears whole or not at all. `to`: a key of `WRITTEN`.

    `dtype` auto keeps the head's. Raises HeadwayError for a head that the engine or its layout cannot carry.
    """
    check_free(out)
    layout = WRITTEN[to].get(head.config.kind)
    if layout is None:
        raise HeadwayError(
            f"--to {to}: takes {' and '.join(WRITTEN[to])} heads, this one is {head.config.kind}{_else(head)}"
        )
    count = _draft_tokens(head, draft_tokens)
    found = layout.write(head, target, to, count)
    tensors = {name: tensor.detach() for name, tensor in found.tensors.items()}
    config, stored = dict(found.config), dtype
    if dtype == "auto":
        check_finite(tensors, "export", "the head is damaged: train it again")
        stored = dtype_name(next(head.parameters()).dtype)
    else:
        tensors = cast(tensors, DTYPES[dtype])
    _state_dtype(config, stored)
    text = serving_text(layout.name, to, target, head, count, stored, found.notes)
    provenance = {
        "layout": layout.name,
        "dtype": stored,
        "head": head_facts(found.head or head),
        "manifest": head.manifest,
    }
    texts = {CONFIG: json_text(config), PROVENANCE: json_text(provenance), SERVING: text}
    write_folder(out, texts, found.weights_name, tensors)
    commands = serving_commands(layout.name, to, target, str(out), count, stored)
    notes = (*found.notes, f"{VLLM_MEDUSA} still do") if isinstance(head, MedusaHead) else found.notes
    return Written(layout.name, count, stored, commands, notes)


def save_headway(read: Read, out: Path, dtype: str = "auto") -> None:
    """Write the head in our own layout to `out`, new or empty."""
    check_free(out)
    state = read.head.state_dict()
    save_head(read.head, out, read.head.manifest, state if dtype == "auto" else cast(state, DTYPES[dtype]))


def _draft_tokens(head: Head, given: int | None) -> int:
    most = head.config.num_heads if isinstance(head, MedusaHead) else None
    if given is not None and (given < 1 or (most is not None and given > most)):
        raise HeadwayError(f"--draft_tokens {given}: give 1 to {most or 'as many as you like'}")
    return given or most or DRAFT_TOKENS


def _else(head: Head) -> str:
    if isinstance(head, MedusaHead):
        return f"; {VLLM_MEDUSA} still do (`--to vllm`), TensorRT-LLM and TGI read `--to medusa`"
    return f"; use --to {' or '.join(name for name, kinds in WRITTEN.items() if head.config.kind in kinds)}"


def _state_dtype(config: dict[str, Any], dtype: str) -> None:
    for place in (config, config.get("transformer_layer_config", {})):
        if "torch_dtype" in place:
            place["torch_dtype"] = dtype


def _target(folder: Path, given: str | None, manifest: dict[str, Any]) -> TargetFacts:
    name = given or manifest.get("target", {}).get("name")
    if not name:
        raise HeadwayError(f"{folder}: does not say which target it belongs to; give it with --target")
    return TargetFacts.load(name)


def _other_target(manifest: dict[str, Any], target: TargetFacts) -> tuple[str, ...]:
    trained = manifest.get("target", {})
    if trained.get("fingerprint") in (None, target.fingerprint):
        return ()
    made_for = f"'{trained.get('name')}' ({trained['fingerprint'][:12]})"
    return (f"the head was made for {made_for}, another model than '{target.name}' ({target.fingerprint[:12]})",)


def _provenance(folder: Path) -> dict[str, Any]:
    """The manifest that an export of ours carries along; {} for heads made elsewhere."""
    path = folder / PROVENANCE
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["manifest"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise HeadwayError(f"{path}: damaged; delete it, or export the head again") from error


def _imported(foreign: Foreign, layout: str, target: TargetFacts) -> dict[str, Any]:
    files = [path for path in (foreign.folder / CONFIG, foreign.weights) if path.is_file()]
    return {
        "kind": "head",
        "made_by": "heads/convert.py",
        "versions": {"torch": torch.__version__},
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "imported": {
            "layout": layout,
            "sha256": {path.name: sha256_file(path) for path in files},
            "notes": list(foreign.notes),
        },
    }
