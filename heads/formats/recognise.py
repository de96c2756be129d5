"""Which layout a folder holds, told by its tensors' names first and by its config second."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.errors import HeadwayError
from heads.formats.files import find_weights, read_config, read_names

HEADWAY = "headway"
EAGLE3, SPECULATORS, EAGLE1 = "eagle3-raw", "speculators", "eagle"
MEDUSA, MEDUSA_ENGINE = "medusa", "medusa-engine"

_ORIGINAL = re.compile(r"(?:medusa_heads?\.)?\d+\.\d+\.linear\.weight")
_BLOCKS = re.compile(r"(?:medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.weight")


def recognise(folder: Path) -> str | None:
    """The name of the layout in `folder`, None where it is none that we know.

    Raises HeadwayError for damaged files and for heads of a method that has no class here.
    """
    config = read_config(folder)
    if "kind" in config:
        return HEADWAY
    weights = find_weights(folder)
    return None if weights is None else layout_of(config, read_names(weights), folder)


def layout_of(config: dict[str, Any], names: Sequence[str], where: Path) -> str | None:
    """`recognise` for a config and the names of the tensors; `where` is the folder in errors."""
    if "kind" in config:
        return HEADWAY
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3") or "dflash_config" in config:
        raise HeadwayError(f"{where}: a {kind or 'dflash'} head; EAGLE, EAGLE-3 and Medusa heads are read")
    return SPECULATORS if kind else _by_names(names, config)


def _by_names(names: Sequence[str], config: dict[str, Any]) -> str | None:
    plain = [name.removeprefix("model.") for name in names]
    if any(_ORIGINAL.fullmatch(name) for name in plain):
        return MEDUSA
    if any(_BLOCKS.fullmatch(name) for name in plain):
        return MEDUSA_ENGINE
    if "fc.weight" not in plain:
        return None
    eagle3 = any(name.startswith("midlayer.") or name in ("d2t", "layers.0.hidden_norm.weight") for name in plain)
    return EAGLE3 if eagle3 or any("Eagle3" in str(name) for name in config.get("architectures") or ()) else EAGLE1
