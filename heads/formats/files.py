"""Foreign checkpoints on disk: safetensors (sharded or not) and pickled state dicts in, a folder that appears whole out."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.errors import HeadwayError

CONFIG = "config.json"
INDEX = ".index.json"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.pt",
    "medusa_lm_head.bin",
)
"""Where public heads keep their tensors; the first of these that is there counts."""
PROVENANCE = "headway.json"
COPY_AGAIN = "download or copy the head again"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Foreign:
    """A head as its folder holds it. `notes` collects what a reader has to tell the person who converts it."""

    folder: Path
    weights: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Something the person should know; said once."""
        if text not in self.notes:
            self.notes.append(text)

    def drop(self, unused: Callable[[str], bool], why: str) -> None:
        """Leave out the tensors whose names `unused` picks, and say so."""
        if names := sorted(name for name in self.tensors if unused(name)):
            for name in names:
                del self.tensors[name]
            self.note(f"left out {', '.join(names)}: {why}")


def find_weights(folder: Path) -> Path | None:
    """The file, or the index of files, that holds a foreign head's tensors."""
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; {} where there is none, as in some Medusa folders. Raises HeadwayError where it is no JSON object."""
    path = folder / CONFIG
    return read_json(path, COPY_AGAIN) if path.is_file() else {}


def read_names(weights: Path) -> list[str]:
    """The tensors' names; of safetensors the header alone is read."""
    if weights.name.endswith(INDEX):
        return sorted(_weight_map(weights))
    if weights.suffix == ".safetensors":
        try:
            with safe_open(weights, framework="pt") as file:
                return sorted(file.keys())
        except (SafetensorError, OSError) as error:
            raise _unreadable(weights, error) from error
    return sorted(_read_pickle(weights))


def read_foreign(folder: Path) -> Foreign:
    """The whole head in memory, integers as int64, masks as bool, all floats in one dtype, the widest that is there.

    Raises HeadwayError for missing or damaged files, quantised tensors and values that are not finite.
    """
    weights = find_weights(folder)
    if weights is None:
        raise HeadwayError(f"{folder}: holds none of {', '.join(WEIGHTS)}; give the folder of a head")
    files = [weights]
    if weights.name.endswith(INDEX):
        files = [weights.with_name(name) for name in sorted(set(_weight_map(weights).values()))]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    foreign = Foreign(folder, weights, read_config(folder), tensors)
    _settle_dtypes(foreign)
    return foreign


def check_finite(tensors: dict[str, Tensor], where: Path | str, remedy: str) -> None:
    """Raise HeadwayError naming the first tensor with a NaN or an infinity."""
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise HeadwayError(f"{where}: tensor `{name}` holds values that are not finite; {remedy}")


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], where: Path | str) -> None:
    """Raise HeadwayError for the first tensor that is missing, unknown or misshapen."""
    for name in sorted(set(expected) - set(tensors)):
        raise HeadwayError(f"{where}: tensor `{name}` is missing; the file is not a whole head")
    for name in sorted(set(tensors) - set(expected)):
        raise HeadwayError(
            f"{where}: tensor `{name}` is none that this layout knows; this head does more than it can say"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise HeadwayError(f"{where}: tensor `{name}` has shape {list(tensors[name].shape)}, not {list(shape)}")


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """All floats in `dtype`. Raises HeadwayError where a value does not fit, which float16 is narrow enough for."""
    made = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    check_finite(made, "conversion", f"they overflow in {dtype_name(dtype)}: use bfloat16 or float32")
    return made


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, as configs say it."""
    return str(dtype).removeprefix("torch.")


def json_text(value: dict[str, Any]) -> str:
    """As all JSON files of a head are written."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def check_free(out: Path) -> None:
    """Raise HeadwayError where `out` holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadwayError(f"{out}: there is something already; give a new folder")


def write_folder(out: Path, texts: dict[str, str], weights_name: str, tensors: dict[str, Tensor]) -> None:
    """Write the files to `out`, new or empty, which appears whole or not at all."""
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    stage = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        stage.mkdir()
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(flat, stage / weights_name, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; give it the permissions the others got.
        os.chmod(stage / weights_name, (stage / next(iter(texts))).stat().st_mode)
        if out.is_dir():
            out.rmdir()
        os.replace(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _settle_dtypes(foreign: Foreign) -> None:
    floats = {tensor.dtype for tensor in foreign.tensors.values() if tensor.is_floating_point()}
    if strange := floats - set(DTYPES.values()) - {torch.float64}:
        found = sorted(map(dtype_name, strange))
        raise HeadwayError(
            f"{foreign.weights}: holds {found[0]} tensors; quantised heads are not read, give the original"
        )
    if not floats:
        raise HeadwayError(f"{foreign.weights}: holds no weights")
    widest = next(iter(floats))
    for dtype in floats:
        widest = torch.promote_types(widest, dtype)
    if len(floats) > 1:
        foreign.note(f"tensors of {sorted(map(dtype_name, floats))} are mixed: all are read as {dtype_name(widest)}")
    stated = foreign.config.get("torch_dtype") or foreign.config.get("dtype")
    if isinstance(stated, str) and stated.removeprefix("torch.") != dtype_name(widest):
        foreign.note(f"the config says {stated}, the file holds {dtype_name(widest)}: the file is right")
    for name, tensor in foreign.tensors.items():
        if tensor.is_floating_point():
            foreign.tensors[name] = tensor.to(widest)
        elif tensor.dtype not in (torch.bool, torch.int64):
            foreign.tensors[name] = tensor.to(torch.int64)
    check_finite(foreign.tensors, foreign.weights, "the head is damaged: download or train it again")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """A state dict; nothing but tensors is unpickled."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise HeadwayError(f"{path}: not a state dict (names with tensors); save the head's state dict alone")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    found = read_json(path, COPY_AGAIN).get("weight_map")
    if not isinstance(found, dict) or any(Path(str(name)).name != name for name in found.values()):
        raise HeadwayError(f"{path}: its `weight_map` does not name files beside it; download the head again")
    return found


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object of a file. Raises HeadwayError, with the remedy, for anything else in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeadwayError(f"{path}: not JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise HeadwayError(f"{path}: not a JSON object; {remedy}")
    return value


def _unreadable(path: Path, error: Exception) -> HeadwayError:
    return HeadwayError(
        f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); download or copy the head again"
    )
