"""JSON objects on disk that carry a checksum of their own content, so that no edited value is taken for what was written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from data_prep.strict_json import loads
from heads.errors import HeadwayError, atomic_write_text

SEAL = "content_sha256"


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and its seal, which takes the place of one that is there, atomically."""
    rest = _without_seal(content)
    atomic_write_text(path, json.dumps(rest | {SEAL: _seal(rest)}, indent=1) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object from a file, its seal unchecked; HeadwayError with the remedy when it holds anything else."""
    try:
        content = loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadwayError(f"{path}: missing; {remedy}") from error
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise HeadwayError(f"{path}: not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise HeadwayError(f"{path}: not a JSON object; {remedy}")
    return content


def unsealed(path: Path, content: dict[str, Any], remedy: str) -> dict[str, Any]:
    """What `read_json` found in `path`, without the seal; HeadwayError when the two do not fit."""
    rest = _without_seal(content)
    if content.get(SEAL) != _seal(rest):
        raise HeadwayError(f"{path}: its content does not fit its checksum; {remedy}")
    return rest


def _without_seal(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != SEAL}


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
