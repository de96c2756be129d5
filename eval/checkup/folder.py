"""A head's folder as it lies there: config, tensors and papers, read without the demands of the strict readers."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eval.checkup.finding import Code, Finding
from eval.checkup.header import Entry, read_header, some
from heads.checkpoint import COMMITTED, CONFIG, MANIFEST
from heads.checkpoint import WEIGHTS as OWN_WEIGHTS
from heads.errors import HeadwayError
from heads.formats.files import INDEX, PROVENANCE, dtype_name, find_weights
from heads.formats.recognise import HEADWAY, layout_of

AGAIN = "download, copy or export the head again"


@dataclass
class HeadFolder:
    """What a folder holds; `findings` are about what cannot be read.

    `layout` None: its file is so damaged that nobody knows. `entries`: every tensor of the file by its name there;
    `tensors`: the same with their values, None where the file is damaged. `manifest`: of the training, {} for heads made
    elsewhere; `listed`: whether `entries` are all that the files hold; `trained`: what the head was when it was trained or exported (heads/provenance.py), {} where nobody wrote it.
    """

    path: Path
    layout: str | None
    config: dict[str, Any]
    weights: Path
    entries: dict[str, Entry]
    tensors: dict[str, Tensor] | None
    manifest: dict[str, Any]
    trained: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    listed: bool = True

    @property
    def config_file(self) -> Path:
        return self.weights.with_name(CONFIG)


def open_folder(path: Path) -> HeadFolder:
    """Raises HeadwayError for a folder that is not there or holds no head of a known layout."""
    if not path.is_dir():
        raise HeadwayError(f"{path}: no such folder; give the folder of a head")
    findings: list[Finding] = []
    place = path / COMMITTED if (path / COMMITTED / CONFIG).is_file() else path
    config = _json(place / CONFIG, findings)
    weights = place / OWN_WEIGHTS if "kind" in config else find_weights(path)
    if weights is None:
        raise HeadwayError(f"{path}: holds no weights that are known; give the folder of a head")
    entries, tensors, listed = _read_weights(weights, findings)
    layout = layout_of(config, sorted(entries), path)
    if layout is None and not findings:
        raise HeadwayError(
            f"{path}: no head of a layout that is known; give the folder of a head, not of another model"
        )
    papers = _json(place / (MANIFEST if layout == HEADWAY else PROVENANCE), findings)
    manifest = papers if layout == HEADWAY else _object(papers.get("manifest"))
    trained = _object(papers.get("head"))
    return HeadFolder(path, layout, config, weights, entries, tensors, manifest, trained, findings, listed)


def _json(path: Path, findings: list[Finding]) -> dict[str, Any]:
    """{} where there is no such file, or, with a finding, where it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        findings.append(Finding(Code.CONFIG, str(path), f"not JSON ({' '.join(str(error).split())[:120]})", AGAIN))
        return {}
    if not isinstance(found, dict):
        findings.append(Finding(Code.CONFIG, str(path), "not a JSON object", AGAIN))
        return {}
    return found


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_weights(weights: Path, findings: list[Finding]) -> tuple[dict[str, Entry], dict[str, Tensor] | None, bool]:
    """Entries of all files together; no tensors where one of them is damaged; whether every file could be listed at least."""
    files = [weights]
    if weights.name.endswith(INDEX):
        named = _json(weights, findings).get("weight_map", {})
        files = [weights.with_name(Path(str(name)).name) for name in sorted(set(map(str, named.values())))]
    entries: dict[str, Entry] = {}
    tensors: dict[str, Tensor] = {}
    whole = listed = bool(files)
    for file in files:
        reader: Callable[[Path], tuple[dict[str, Entry], dict[str, Tensor], str | None]]
        reader = _safetensors if file.suffix == ".safetensors" else _pickle
        found, values, fault = reader(file) if file.is_file() else ({}, {}, "there is no such file")
        if fault is not None:
            findings.append(Finding(Code.TRUNCATED, str(file), fault, AGAIN))
            whole, listed = False, listed and bool(found)
        entries |= found
        tensors |= values
    return entries, tensors if whole else None, listed


def _safetensors(path: Path) -> tuple[dict[str, Entry], dict[str, Tensor], str | None]:
    header = read_header(path)
    if header.fault is not None:
        return header.entries, {}, header.fault
    try:
        with safe_open(path, framework="pt") as file:
            return header.entries, {name: file.get_tensor(name) for name in header.entries}, None
    except (SafetensorError, OSError) as error:
        return header.entries, {}, f"cannot be read ({' '.join(str(error).split())[:120]})"


def _pickle(path: Path) -> tuple[dict[str, Entry], dict[str, Tensor], str | None]:
    """A state dict; nothing but tensors is unpickled."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        return {}, {}, f"cannot be read ({' '.join(str(error).split())[:120]})"
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        return {}, {}, "not a state dict (names with tensors)"
    return {name: Entry(dtype_name(value.dtype), tuple(value.shape)) for name, value in found.items()}, found, None


def check_values(folder: HeadFolder) -> list[Finding]:
    """Findings about values that are not finite, and a dtype that the config does not name."""
    found: list[Finding] = []
    bad = {
        name: dtype_name(tensor.dtype)
        for name, tensor in sorted((folder.tensors or {}).items())
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all())
    }
    half = [name for name, dtype in bad.items() if dtype == "float16"]
    if half:
        mend = "convert the original to bfloat16 or float32 (`heads/convert.py --dtype bfloat16`)"
        found.append(Finding(Code.OVERFLOW, str(folder.weights), f"{some(half)}: beyond what float16 holds", mend))
    if rest := [name for name in bad if name not in half]:
        found.append(Finding(Code.NOT_FINITE, str(folder.weights), f"{some(rest)}: holds NaN or infinities", AGAIN))
    stored = sorted({entry.dtype for entry in folder.entries.values() if "float" in entry.dtype})
    stated = folder.config.get("torch_dtype") or folder.config.get("dtype")
    if isinstance(stated, str) and stored and stated.removeprefix("torch.") not in stored:
        mend = f'write "torch_dtype": "{stored[0]}", or serve with --dtype {stored[0]}'
        what = f"the config says {stated}, the file holds {' and '.join(stored)}: engines convert without a word"
        found.append(Finding(Code.DTYPE, f"{folder.config_file}: `torch_dtype`", what, mend, "warning", True))
    return found
