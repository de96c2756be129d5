"""A head on disk: a folder with config.json, model.safetensors and manifest.json. One registry: kind -> class.

Saving is atomic as a set: the three files are written to a folder of their own inside, which one rename declares valid; only
then do they move to their places. A reader prefers files still waiting there, so a kill at any moment leaves the old head or
the new one, whole.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.errors import HeadwayError, sha256_file
from heads.formats.recognise import HEADWAY, recognise
from heads.hub import resolve_head

CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "manifest.json"
COMMITTED = ".commit"


@dataclass(frozen=True)
class HeadConfig:
    """What a head's shape is; `kind` names its class in the registry."""

    kind: ClassVar[str]


class Head(nn.Module):
    """A trained drafter: built from its config alone; `manifest` says where the weights come from."""

    config_class: ClassVar[type[HeadConfig]]
    config: HeadConfig
    manifest: dict[str, Any]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.manifest = {}

    def check(self) -> None:
        """Raise HeadwayError when buffers contradict each other or the config; called after loading."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config, weights and manifest to `folder`, atomically."""
        save_head(self, folder, self.manifest)


AnyHead = TypeVar("AnyHead", bound=Head)
_REGISTRY: dict[str, type[Head]] = {}


def register(head_class: type[Head]) -> type[Head]:
    """Class decorator: `load_head` finds the class by its config's kind."""
    _REGISTRY[head_class.config_class.kind] = head_class
    return head_class


def save_head(head: Head, folder: str | Path, manifest: dict[str, Any], state: dict[str, Tensor] | None = None) -> None:
    """Write `head` to `folder`, replacing an earlier head there as a whole; other files in `folder` are left alone.

    `state` overrides the head's own state dict (a sharded engine gathers it). The manifest must be JSON.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _finish_commit(folder)
    for stale in folder.glob(".new-*"):
        shutil.rmtree(stale)
    stage = folder / f".new-{os.getpid()}"
    stage.mkdir()
    config = {"kind": head.config.kind, **asdict(head.config)}
    _write_json(stage / CONFIG, config)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (state or head.state_dict()).items()}
    save_file(tensors, stage / WEIGHTS, metadata={"format": "pt"})
    # safetensors makes files that only their owner may read; give it the permissions the others got.
    os.chmod(stage / WEIGHTS, (stage / CONFIG).stat().st_mode)
    _write_json(stage / MANIFEST, manifest)
    for name in (CONFIG, WEIGHTS, MANIFEST):
        _sync(stage / name)
    os.replace(stage, folder / COMMITTED)
    _sync(folder)
    _finish_commit(folder)


def load_head(
    path: str | Path,
    *,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Head:
    """The head in folder `path`, or of that name on the Hub, in evaluation mode; `dtype` null keeps the stored one.

    `revision` is a branch, tag or commit of the Hub. Raises HeadwayError for what cannot be found or fetched, a missing or damaged
    file, an unknown kind or key, and missing, extra or misshapen tensors.
    """
    folder = resolve_head(path, revision)
    _refuse_foreign(folder)
    config = _read_json(folder, CONFIG)
    head_class = _REGISTRY.get(config.pop("kind", ""))
    if head_class is None:
        raise HeadwayError(f"{folder / CONFIG}: `kind` is not one of {sorted(_REGISTRY)}; not a head of this project")
    parsed = _parse_config(head_class.config_class, config, folder / CONFIG)
    weights = _locate(folder, WEIGHTS)
    head = build_head(head_class, parsed, _read_tensors(weights), weights)
    head.manifest = _read_json(folder, MANIFEST)
    return head.to(device=device, dtype=dtype)


def build_head(head_class: type[AnyHead], config: HeadConfig, tensors: dict[str, Tensor], where: Path) -> AnyHead:
    """A head of `config` that holds `tensors`, in evaluation mode; `where` names them in errors.

    Raises HeadwayError for missing, extra and misshapen tensors, and where they contradict each other.
    """
    with torch.device("meta"):
        head = head_class(config)
    _check_tensors(head, tensors, where)
    head.load_state_dict(tensors, assign=True)
    try:
        head.check()
    except HeadwayError as error:
        raise HeadwayError(f"{where}: {error}") from error
    return head.eval()


def _refuse_foreign(folder: Path) -> None:
    """Raise HeadwayError with the command that converts it where a folder holds a head in the layout of an engine."""
    if any((place / MANIFEST).exists() for place in (folder / COMMITTED, folder)):
        return
    layout = recognise(folder)
    if layout not in (None, HEADWAY):
        command = f"python heads/convert.py --head {folder} --target TARGET --to {HEADWAY} --out NEW_FOLDER"
        raise HeadwayError(f"{folder}: a head in the {layout} layout; convert it first: {command}")


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of the head in folder `path`, or of that name on the Hub. Raises HeadwayError when it is missing or damaged."""
    return _read_json(resolve_head(path), MANIFEST)


def weights_sha256(path: str | Path) -> str:
    """Hex SHA-256 of a head's weight file: which head it is. Raises HeadwayError when it is missing."""
    return sha256_file(_locate(resolve_head(path), WEIGHTS))


def head_files(path: str | Path) -> dict[str, Path]:
    """The valid copies of a head's three files by their names. Raises HeadwayError when one is missing."""
    folder = resolve_head(path)
    return {name: _locate(folder, name) for name in (CONFIG, WEIGHTS, MANIFEST)}


def _parse_config(config_class: type[HeadConfig], values: dict[str, Any], where: Path) -> HeadConfig:
    known = {field.name: field for field in fields(config_class)}
    if unknown := sorted(set(values) - set(known)):
        raise HeadwayError(f"{where}: unknown key `{unknown[0]}`; known are {sorted(known)}")
    required = {name for name, field in known.items() if field.default is MISSING}
    if missing := sorted(required - set(values)):
        raise HeadwayError(
            f"{where}: key `{missing[0]}` is missing; the file is not a whole {config_class.kind} config"
        )
    try:
        return config_class(**values)
    except HeadwayError as error:
        raise HeadwayError(f"{where}: {error}") from error


def _read_tensors(weights: Path) -> dict[str, Tensor]:
    try:
        with safe_open(weights, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise HeadwayError(f"{weights}: cannot be read ({error}); train, convert or copy the head again") from error


def _check_tensors(head: Head, found: dict[str, Tensor], weights: Path) -> None:
    """Every name, shape and kind of dtype held against the head's."""
    expected = head.state_dict()
    if missing := sorted(set(expected) - set(found)):
        raise HeadwayError(f"{weights}: tensor `{missing[0]}` is missing ({len(missing)} in all)")
    if extra := sorted(set(found) - set(expected)):
        raise HeadwayError(f"{weights}: tensor `{extra[0]}` does not belong to this head ({len(extra)} in all)")
    for name, tensor in found.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            raise HeadwayError(
                f"{weights}: tensor `{name}` has shape {list(tensor.shape)}, its {CONFIG} asks for {list(wanted.shape)}"
            )
        if tensor.dtype != wanted.dtype and not (tensor.is_floating_point() and wanted.is_floating_point()):
            raise HeadwayError(f"{weights}: tensor `{name}` is {tensor.dtype}, not {wanted.dtype}")


def _locate(folder: Path, name: str) -> Path:
    """The valid copy of a file: one that an interrupted commit left waiting comes first."""
    for path in (folder / COMMITTED / name, folder / name):
        if path.is_file():
            return path
    raise HeadwayError(f"{folder / name}: no such file; a head's folder holds {CONFIG}, {WEIGHTS} and {MANIFEST}")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = _locate(folder, name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: not JSON ({error}); train, convert or copy the head again") from error
    if not isinstance(value, dict):
        raise HeadwayError(f"{path}: not a JSON object; train, convert or copy the head again")
    return value


def _finish_commit(folder: Path) -> None:
    committed = folder / COMMITTED
    if not committed.is_dir():
        return
    for name in (CONFIG, WEIGHTS, MANIFEST):
        if (committed / name).exists():
            os.replace(committed / name, folder / name)
    _sync(folder)
    committed.rmdir()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
