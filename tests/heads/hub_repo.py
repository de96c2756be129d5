"""A repository of the stand-in for the Hub, in memory, and what the Hub objects to in a card."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """Branches point to commits; a commit is path -> content. `lfs` holds the paths that went through LFS."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    lfs: set[str] = field(default_factory=set)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{message} {sorted(files)} {len(self.commits)}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


def problems(metadata: Any) -> list[str]:
    """What the Hub objects to in a card's metadata, as far as its documentation says."""
    if not isinstance(metadata, dict):
        return ["no metadata"]
    found = [key for key in ("license", "library_name") if not isinstance(metadata.get(key), str)]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(metadata.get("base_model"))):
        found.append("base_model is no model id")
    if not all(isinstance(tag, str) for tag in metadata.get("tags", [])):
        found.append("tags are no texts")
    for model in metadata.get("model-index", []):
        for result in model["results"]:
            wanted = (result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"])
            metrics = [(metric["type"], metric["value"]) for metric in result["metrics"]]
            if not all(isinstance(text, str) and text for text in wanted) or not metrics:
                found.append("model-index")
            found += [name for name, value in metrics if not isinstance(value, int | float)]
    return found
