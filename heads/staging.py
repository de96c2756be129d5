"""The folder that is published: a head in its layouts, what proves it, its card, and no path of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heads.checkpoint import MANIFEST, Head, head_files
from heads.embedded import EMBEDDED
from heads.errors import HeadwayError
from heads.folders import cache_folder
from heads.formats.files import check_finite, json_text
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head
from heads.formats.serving import serving_commands
from heads.model_card import Facts, Served, model_card
from heads.private_paths import named_after, paths_in, replace_paths
from heads.proof import CERTIFICATE, REPORT, REPORT_FILES, Identity, MeasuredReport

CARD = "README.md"
EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Publication:
    """All that is published, checked. `target`: where the target is here; `base_model`: what others find it under."""

    repo: str
    revision: str | None
    head: Head
    identity: Identity
    layouts: tuple[str, ...]
    reports: tuple[MeasuredReport, ...]
    certificate: dict[str, Any] | None
    target: str
    base_model: str
    license: str
    dtype: str
    draft_tokens: int | None

    @property
    def manifest(self) -> dict[str, Any]:
        """The head's, with the target under its public name."""
        target = self.identity.manifest["target"]
        return self.identity.manifest | {"target": target | {"name": self.public_target}}

    @property
    def public_target(self) -> str:
        """What our scripts take for --target elsewhere."""
        return EMBEDDED if self.identity.manifest["target"].get("name") == EMBEDDED else self.base_model


def stage(publication: Publication, folder: Path) -> None:
    """Write everything to `folder`, the same bytes for the same publication. Raises HeadwayError for what a layout cannot carry."""
    check_finite(publication.head.state_dict(), publication.identity.folder, "the head is damaged: train it again")
    for name, path in head_files(publication.identity.folder).items():
        shutil.copyfile(path, folder / name)
    (folder / MANIFEST).write_text(json_text(publication.manifest), encoding="utf-8")
    reports = tuple(_stage_reports(publication.reports, folder))
    if publication.certificate is not None:
        text = json.dumps(publication.certificate, indent=1, allow_nan=False) + "\n"
        (folder / CERTIFICATE).write_text(text, encoding="utf-8")
    facts = Facts(
        repo=publication.repo,
        revision=publication.revision,
        kind=publication.head.config.kind,
        license=publication.license,
        base_model=publication.base_model,
        target=publication.public_target,
        trained_for=publication.manifest["target"],
        weights_sha256=publication.identity.weights_sha256,
        served=_export(publication, folder),
        reports=reports,
        certificate=publication.certificate,
    )
    try:
        text = str(model_card(facts))
    except (KeyError, TypeError, ValueError) as error:
        raise HeadwayError(
            f"{publication.identity.folder}: no card can be made of its report ({error!r}); measure again"
        ) from error
    (folder / CARD).write_text(text, encoding="utf-8")
    replace_paths(folder, _names(publication))


def _stage_reports(reports: tuple[MeasuredReport, ...], folder: Path) -> Iterator[tuple[str, MeasuredReport]]:
    """One report lies at the root, several in folders named after their data sets; yields where each one's report.json is."""
    taken: set[str] = set()
    for report in reports:
        place = "" if len(reports) == 1 else f"reports/{report.slug}/"
        while place in taken:
            place = place.removesuffix("/") + "-again/"
        taken.add(place)
        (folder / place).mkdir(parents=True, exist_ok=True)
        for name in REPORT_FILES:
            shutil.copyfile(report.folder / name, folder / place / name)
        yield f"{place}{REPORT}", report


def _export(publication: Publication, folder: Path) -> tuple[Served, ...]:
    """Write the engines' layouts, each into a folder of its name."""
    if not publication.layouts:
        return ()
    target = TargetFacts.load(publication.target)
    if target.fingerprint != publication.identity.fingerprint:
        raise HeadwayError(
            f"{publication.target}: another model ({target.fingerprint[:12]}) than the head in {publication.identity.folder} "
            f"was trained for ({publication.identity.fingerprint[:12]}); give --target the right one"
        )
    target = replace(target, hub_id=publication.base_model)
    publication.head.manifest = publication.manifest
    served = []
    for name in publication.layouts:
        out = folder / name
        written = export_head(publication.head, target, name, out, publication.dtype, publication.draft_tokens)
        place = f"{publication.repo.rpartition('/')[2]}/{name}"
        commands = serving_commands(written.layout, name, target, place, written.draft_tokens, written.dtype)
        served.append(Served(name, tuple(command.line for command in commands), written.notes))
    return tuple(served)


def _names(publication: Publication) -> dict[str, str]:
    """What stands for each path of this machine: public names for target and head, the last part for all others."""
    proofs = [report.content | {"examples": []} for report in publication.reports]
    names = named_after(paths_in([publication.identity.manifest, publication.certificate, *proofs]))
    names |= {str(cache_folder().resolve()): "headway-cache"}
    if len(Path.home().parts) > 1:
        names[str(Path.home())] = "~"
    names |= dict.fromkeys(_spellings(publication.identity.folder), publication.repo)
    targets = [publication.identity.manifest["target"], *(report.content["target"] for report in publication.reports)]
    for name in (publication.target, *(str(target.get("name")) for target in targets)):
        if "/" in name and Path(name).expanduser().is_dir():
            names |= dict.fromkeys({name, *_spellings(Path(name))}, publication.base_model)
    return names


def _spellings(folder: Path) -> set[str]:
    """The absolute paths of a folder."""
    folder = folder.expanduser()
    return {str(folder.absolute()), str(folder.resolve())}
