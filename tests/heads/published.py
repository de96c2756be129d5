"""What publishing needs in tests: heads with their report and certificate, made by the real scripts on the tiny target."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from rich.console import Console

from eval import certify, measure
from heads import publish
from heads.checkpoint import Head
from heads.target import fingerprint
from tests.heads.foreign import eagle3_head
from tests.heads.hub_server import TOKEN, HubServer

BASE, REPO = "some-org/tiny-llama", "an-org/tiny-eagle3"


@dataclass(frozen=True)
class Proved:
    """Folders of a target, a head for it, its report and its certificate."""

    target: Path
    head: Path
    report: Path
    certificate: Path

    def arguments(self, *more: Any) -> list[str]:
        """A whole command line for publish.py."""
        given = ["--head", self.head, "--repo", REPO, "--base_model", BASE, "--license", "mit"]
        return [*map(str, [*given, "--report", self.report, "--certificate", self.certificate, *more])]


def make_proved(folder: Path, target: Path, prompts: Path) -> Proved:
    """A random EAGLE-3 head, measured and certified; the long parts of the certificate, which no head enters, are left out."""
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    save_trained(eagle3_head(vocab), folder / "head", target)
    sizes = {"count": 2, "max_new_tokens": 5, "repeats": 1, "identity_prompts": 1, "identity_tokens": 4}
    options = measure.Options(
        target=str(target), prompts=prompts, dtype="float32", device="cpu", out=folder / "report", **sizes
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("eval.report.page"), "charts", lambda report: [])  # plotly's script alone is 5 MB
        measure.measure(options, [str(folder / "head")], Console(file=io.StringIO()))
    certificate = certify.Options(
        out=folder / "certificate", head=folder / "head", target=str(target), prompts=prompts, device="cpu", count=1
    )
    rules = [{"name": "a rule", "lossless": True, "max_deviation": 0.0}]
    mutants = [{"name": "a mutant", "killed": True, "max_deviation": 0.1}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certify, "prove_rules", lambda seed: rules)
        patch.setattr(certify, "kill_mutants", lambda seed: list(mutants))
        patch.setattr(certify, "plant_fault", lambda seed: mutants[0])
        tests = [{"drafter": "eagle3", "settings": "a", "p_value": 0.5, "draws": 1}]
        patch.setattr(certify, "test_loop", lambda *_: tests)
        content = certify.certify(certificate, Console(file=io.StringIO()))
    write_json(folder / "certificate" / "certificate.json", content)
    return Proved(target, folder / "head", folder / "report", folder / "certificate")


def save_trained(head: Head, folder: Path, target: Path, **manifest: Any) -> None:
    """Save a head whose manifest says that it was trained for `target`."""
    head.manifest = {
        "target": {"name": str(target), "fingerprint": fingerprint(target)},
        "recipe": {"target": str(target)},
    }
    head.manifest |= manifest
    head.save_pretrained(folder)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def changed(proved: Proved, where: Path, part: str, change: Any) -> Proved:
    """A copy whose report or certificate was changed by `change(content)`."""
    folder = where / part
    shutil.copytree(getattr(proved, part), folder)
    path = folder / f"{part}.json"
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)
    return Proved(**(vars(proved) | {part: folder}))


def use(hub: HubServer, monkeypatch: pytest.MonkeyPatch, cache: Path, token: str | None = TOKEN) -> None:
    """Point huggingface_hub at the stand-in, as HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_DISABLE_XET and HF_TOKEN do before its import."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(
        _http, "time", SimpleNamespace(sleep=lambda seconds: None)
    )  # the library waits between its tries


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    """publish.py as a person starts it, up to the error it raises."""
    monkeypatch.setattr(sys, "argv", ["publish.py", *map(str, arguments)])
    publish.main()
