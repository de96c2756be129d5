"""Taps, rope, positions, norms and heads of a config, held against the target's and against what the head was trained with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from eval.checkup.finding import Code, Finding
from eval.checkup.folder import HeadFolder
from eval.checkup.inventory import ATTENTION
from eval.checkup.stated import Stated, plain_rope
from heads.draft_layer import read_rope
from heads.eagle3 import default_taps
from heads.formats.layout import TargetFacts

SWITCHED = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")
SIZES = ("kind", "hidden_size", "vocab_size", "draft_vocab_size", "num_layers", "num_heads", "fc_bias")
"""What the tensors tell, or the target; a bias of zeros is there for one engine and not for another."""
LOOKED_AT = ("taps", "rope_parameters", "max_position_embeddings", *ATTENTION)
COUNTING = "; `eagle_config` counts outputs of layers, one less than the inputs at the top level"


def check_settings(
    folder: HeadFolder, stated: Stated, target: TargetFacts, earlier: Sequence[Finding]
) -> list[Finding]:
    """Findings; `stated.config` is mended by them. What `earlier` ones have named is not named again."""
    trained = dict(folder.trained.get("config") or {})
    found: list[Finding] = []
    if stated.kind == "eagle3":
        found += _taps(folder, stated, target, trained.get("taps"))
    if stated.kind in ("eagle3", "eagle"):
        found += _rope(folder, stated, trained.get("rope_parameters"))
        found += _positions(folder, stated, target)
        if not any(finding.code is Code.HEAD_DIM for finding in earlier):
            found += _attention(folder, stated, trained)
        stated.config |= {name: trained[name] for name in ATTENTION if name in trained}
    for name, value in trained.items():
        # a layout that has no word for a field cannot have it wrong
        if name in stated.config and name not in (*SIZES, *LOOKED_AT) and stated.config[name] != value:
            found.append(_changed(folder, stated, name, stated.config[name], value))
            stated.config[name] = value
    return found


def _where(folder: HeadFolder, stated: Stated, name: str) -> str:
    return f"{folder.config_file}: `{stated.key(name)}`"


def _attention(folder: HeadFolder, stated: Stated, trained: dict[str, Any]) -> list[Finding]:
    """Other heads of another size can make the same rows of the projections."""
    changed = {
        name: trained[name] for name in ATTENTION if name in trained and trained[name] != stated.config.get(name)
    }
    if not changed:
        return []
    said = ", ".join(f"{stated.key(name)} {stated.config.get(name)}" for name in changed)
    meant = ", ".join(f"{stated.key(name)} {value}" for name, value in changed.items())
    what = f"means {said}; the head was trained with {meant}"
    return [Finding(Code.HEAD_DIM, _where(folder, stated, "head_dim"), what, f"write {meant}", mended=True)]


def _changed(folder: HeadFolder, stated: Stated, name: str, own: Any, trained: Any) -> Finding:
    code = Code.NORM_SWITCH if name in SWITCHED else Code.CONFIG
    what = f"means {_json(own)}, the head was trained with {_json(trained)}"
    mend = f'write "{stated.key(name)}": {_json(trained)}'
    return Finding(code, _where(folder, stated, name), what, mend, mended=True)


def _json(value: Any) -> str:
    return json.dumps(value, default=list)


def _taps(folder: HeadFolder, stated: Stated, target: TargetFacts, trained: list[int] | None) -> list[Finding]:
    taps = tuple(stated.config.get("taps") or ())
    where, last = _where(folder, stated, "taps"), target.num_layers - 1
    named = any(finding.code is Code.TAPS for finding in stated.findings)  # the two countings contradict each other
    if trained is not None:
        meant = tuple(trained)
        if taps == meant or named:
            stated.config["taps"] = meant
            return []
        stated.config["taps"] = meant
        if not stated.taps_named:
            what = f"names no layers to read, so engines read the inputs of {list(taps)}; the head was trained on {list(meant)}"
            mend = f"write {list(meant)} at the top level and {[tap - 1 for tap in meant]} into `eagle_config`, with `num_aux_hidden_states`"
            return [Finding(Code.TAPS_MISSING, where, what, mend, mended=True)]
        what = f"means the inputs of layers {list(taps)}, the head was trained on those of {list(meant)}"
        return [Finding(Code.TAPS, where, what, f"write inputs of {list(meant)}{COUNTING}", mended=True)]
    distinct = all(isinstance(tap, int) and 0 <= tap <= last for tap in taps) and len(set(taps)) == len(taps)
    if named or (distinct and len(taps) == (stated.fused or len(taps))):
        return []
    # something has to be read while the rest is looked at; the probe tries what it could be
    stated.config["taps"] = default_taps(target.num_layers)[: stated.fused]
    code = Code.TAPS if stated.taps_named else Code.TAPS_MISSING
    what = f"means the inputs of layers {list(taps)}, not {stated.fused or 'some'} distinct ones of the target's 0 to {last}"
    return [Finding(code, where, what, f"write the layers that the head was trained on{COUNTING}")]


def _rope(folder: HeadFolder, stated: Stated, trained: dict[str, Any] | None) -> list[Finding]:
    """Without papers another rope than the target's is no fault yet: the probe decides (eval/checkup/repairs.py)."""
    own = plain_rope(dict(stated.config.get("rope_parameters") or {}))
    if trained is None or own == (meant := plain_rope(trained)):
        return []
    stated.config["rope_parameters"] = meant
    what = f"means {own}, the head was trained with {meant}"
    return [Finding(Code.ROPE, _where(folder, stated, "rope_parameters"), what, f"write {meant}", mended=True)]


def _positions(folder: HeadFolder, stated: Stated, target: TargetFacts) -> list[Finding]:
    own, theirs = stated.config.get("max_position_embeddings"), target.max_positions
    if not isinstance(own, int) or theirs is None or own >= theirs:
        return []
    stated.config["max_position_embeddings"] = theirs
    said = "says" if "max_position_embeddings" in stated.says else "says nothing, which means"
    what = (
        f"the config {said} {own}, the target goes on to {theirs}: behind {own} tokens nothing, or rubbish, is drafted"
    )
    mend = f"write the target's {theirs}"
    return [Finding(Code.MAX_POSITIONS, _where(folder, stated, "max_position_embeddings"), what, mend, mended=True)]


def target_rope(target: TargetFacts) -> dict[str, Any]:
    """The target's own rope, comparable with `stated`'s."""
    return plain_rope(read_rope(target.config))


def check_tie(folder: HeadFolder, stated: Stated) -> list[Finding]:
    """An output of its own, and a config that says the output is an embedding."""
    outputs = [name for name in folder.entries if name.startswith("lm_head") or ".lm_head" in name]
    if stated.kind != "eagle3" or not folder.config.get("tie_word_embeddings") or not outputs:
        return []
    where = f"{folder.config_file}: `tie_word_embeddings`"
    what = (
        f"true, and the file holds `{outputs[0]}` of its own: an engine that heeds it drafts with the embedding instead"
    )
    return [Finding(Code.LM_HEAD_LOST, where, what, 'write "tie_word_embeddings": false', mended=True)]
