"""What is published to prove a head: reports of eval/measure.py and a certificate of eval/certify.py, held against the head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.checkpoint import MANIFEST, read_manifest, weights_sha256
from heads.errors import HeadwayError
from heads.formats.files import read_json

REPORT, REPORT_FILES = "report.json", ("report.json", "report.md", "report.html")
CERTIFICATE = "certificate.json"
HELD_OUT = "headway-held-out"


@dataclass(frozen=True)
class Identity:
    """A head as proofs know it: the hash of its weights, its manifest, its target's fingerprint."""

    folder: Path
    weights_sha256: str
    manifest: dict[str, Any]
    fingerprint: str

    @classmethod
    def of(cls, folder: Path) -> Identity:
        """Of the head in `folder`. Raises HeadwayError where its manifest does not say which target it was trained for."""
        manifest = read_manifest(folder)
        fingerprint = manifest.get("target", {}).get("fingerprint")
        if not isinstance(fingerprint, str):
            raise HeadwayError(
                f"{folder / MANIFEST}: names no target with its fingerprint; train or convert the head again"
            )
        return cls(folder, weights_sha256(folder), manifest, fingerprint)


@dataclass(frozen=True)
class MeasuredReport:
    """A report, and in it what this head did: `runs` as report.json has them."""

    folder: Path
    content: dict[str, Any]
    runs: tuple[dict[str, Any], ...]
    dataset: str

    @property
    def slug(self) -> str:
        """The data set's name for paths and metadata."""
        return re.sub(r"[^a-z0-9._-]+", "-", self.dataset.lower()).strip("-.") or "prompts"


def read_report(folder: Path, head: Identity) -> MeasuredReport:
    """The report in `folder`. Raises HeadwayError where it is not whole, of another head or target, or shows changed text."""
    path = folder / REPORT
    for name in REPORT_FILES:
        if not (folder / name).is_file():
            raise HeadwayError(f"{folder / name}: no such file; give --report the folder that eval/measure.py wrote")
    content = read_json(path, "let eval/measure.py write it again")
    again = f"measure this head: python eval/measure.py --head {head.folder} --out NEW"
    try:
        _check_target(path, content["target"], head, again)
        runs = tuple(run for run in content["runs"] if run["head"] is not None and _is_of(content, run["head"], head))
        if not runs:
            raise HeadwayError(f"{path}: no run in it is of the head in {head.folder}; {again}")
        if any(run["lossless"]["greedy_identical"] is not True for run in runs):
            raise HeadwayError(f"{path}: greedy ids of this head differ in fp32: it must not change the text; {again}")
        protocol = content["protocol"]
        dataset = HELD_OUT if protocol["prompts_sha256"] is None else Path(protocol["prompts_file"]).stem
    except (KeyError, TypeError, AttributeError) as error:
        raise HeadwayError(f"{path}: not a whole report ({error!r}); {again}") from error
    return MeasuredReport(folder, content, runs, dataset)


def read_certificate(folder: Path, head: Identity) -> dict[str, Any]:
    """The certificate in `folder`. Raises HeadwayError where it is not whole, of another head or target, or something failed."""
    path = folder / CERTIFICATE
    again = f"certify this head: python eval/certify.py --head {head.folder} --out NEW"
    if not path.is_file():
        raise HeadwayError(f"{path}: no such file; {again}")
    content = read_json(path, "let eval/certify.py write it again")
    try:
        if content.get("head") is None:
            raise HeadwayError(f"{path}: proves the rules alone, or does not say for which head it was made; {again}")
        _check_target(path, content["target"], head, again)
        if content["head"]["weights_sha256"] != head.weights_sha256:
            raise HeadwayError(f"{path}: was made for other weights than those in {head.folder}; {again}")
        if content["failed"]:
            raise HeadwayError(f"{path}: {content['failed'][0]} ({len(content['failed'])} in all); {again}")
        if not all(content[part] for part in ("rules", "mutants", "chi_square", "greedy")):
            raise HeadwayError(f"{path}: leaves something out; {again}")
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise HeadwayError(f"{path}: not a whole certificate ({error!r}); {again}") from error
    return content


def _is_of(content: dict[str, Any], folder: str, head: Identity) -> bool:
    """Whether a run of a report is this head's: by its weights' hash; a report without hashes tells heads by their manifests."""
    made_by = content["made_by"]
    if "weights_sha256" in made_by:
        return made_by["weights_sha256"].get(folder) == head.weights_sha256
    return any(name.endswith(folder) and made == head.manifest for name, made in made_by["heads"].items())


def _check_target(path: Path, target: dict[str, Any], head: Identity, again: str) -> None:
    if target["fingerprint"] != head.fingerprint:
        raise HeadwayError(
            f"{path}: made with target '{target['name']}' ({target['fingerprint'][:12]}), the head in {head.folder} was "
            f"trained for {head.fingerprint[:12]}; {again}"
        )
