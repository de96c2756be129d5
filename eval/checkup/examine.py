"""The whole examination of a head: its files, then its drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eval.checkup.belonging import check_embedding, check_fingerprint, check_sizes, check_target_output
from eval.checkup.draft_map import DraftMap, read_map
from eval.checkup.finding import WARNING, Code, Finding
from eval.checkup.folder import HeadFolder, check_values, open_folder
from eval.checkup.inventory import compare, expected_shapes, settle
from eval.checkup.patient import MAPS, OUTPUT, OUTPUTS, Patient, assemble, own_names
from eval.checkup.settings import check_settings, check_tie
from eval.checkup.stated import Stated, read_config
from eval.checkup.texts import ProbeTexts
from eval.checkup.trial import Probed, Trial
from heads.errors import HeadwayError
from heads.formats.layout import TargetFacts
from heads.target import TargetEnds

NO_MAP = DraftMap(None, None, {})
UNFIT = (
    Code.TRUNCATED,
    Code.TENSOR_MISSING,
    Code.TENSOR_SHAPE,
    Code.NORM_MISSING,
    Code.NOT_FINITE,
    Code.OVERFLOW,
)
"""What keeps a head from being probed."""
TextSource = Callable[[TargetFacts, HeadFolder], ProbeTexts]


@dataclass
class Checkup:
    """What was found. `target` None: the head is too damaged to ask. `unprobed`: why there is no probe."""

    folder: HeadFolder
    kind: str | None
    target: TargetFacts | None
    findings: list[Finding]
    probed: Probed | None = None
    unprobed: str | None = None
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Nothing but warnings."""
        return all(finding.severity == WARNING for finding in self.findings)


@dataclass(frozen=True)
class _Files:
    """What the files alone tell. `served`, `mended`: the head as engines read it and put right, None where it makes none."""

    stated: Stated
    drafts: DraftMap
    served: Patient | None
    mended: Patient | None


def examine(path: Path, target_name: str | None, text_source: TextSource) -> Checkup:
    """Look at the head in folder `path`; `target_name` None: the target that its manifest names.

    Raises HeadwayError for a folder without a head, a target that is not to be had, and texts that cannot be used.
    """
    begun = time.monotonic()
    folder = open_folder(path)
    if folder.layout is None or not folder.listed:
        return Checkup(folder, None, None, folder.findings, unprobed="its file is damaged")
    name = target_name or (folder.manifest.get("target") or {}).get("name")
    if not name:
        raise HeadwayError(f"{path}: does not say which target it belongs to; give it with --target")
    target = TargetFacts.load(name)
    stated = read_config(folder, target)
    findings = [*folder.findings, *stated.findings]
    checkup = Checkup(folder, stated.kind or None, target, findings)
    if stated.kind:
        files = _look(folder, stated, target, findings)
        _probe(checkup, files, text_source)
    else:
        checkup.unprobed = "its kind is not known"
    checkup.seconds = time.monotonic() - begun
    return checkup


def _look(folder: HeadFolder, stated: Stated, target: TargetFacts, findings: list[Finding]) -> _Files:
    """Everything that can be told without drafting."""
    names = own_names(str(folder.layout), folder.entries)
    entries = {own: folder.entries[name] for name, own in names.items()}
    findings += settle(folder, stated, entries)
    as_read = dict(stated.config)
    findings += check_settings(folder, stated, target, findings)
    findings += check_values(folder)
    findings += check_tie(folder, stated)
    findings += check_fingerprint(folder, target)
    if not any(finding.code is Code.OTHER_TARGET for finding in findings):
        findings += check_sizes(folder, stated, target)
    findings += check_target_output(target)
    try:
        wanted = expected_shapes(folder, stated)
    except HeadwayError as error:
        findings.append(Finding(Code.CONFIG, str(folder.config_file), str(error), "export the head again"))
        return _Files(stated, NO_MAP, None, None)
    findings += compare(folder, stated, entries, wanted)
    if folder.tensors is None:
        return _Files(stated, NO_MAP, None, None)
    named = {own: folder.tensors[name] for name, own in names.items()}
    if not any(finding.code is Code.OTHER_TARGET for finding in findings):
        findings += check_embedding(folder, named, target)
    mapped = stated.config.get("draft_vocab_size")
    drafts = read_map(named, mapped, stated.config["vocab_size"], folder.trained.get("map_sha256"), str(folder.weights))
    findings += drafts.findings
    if any(finding.code in UNFIT for finding in findings) or not fits(stated, target):
        return _Files(stated, drafts, None, None)
    named = {name: tensor for name, tensor in named.items() if name in wanted or name in MAPS}
    return _patients(_Files(stated, drafts, None, None), named, as_read, set(wanted) - set(named), target)


def _patients(
    files: _Files, named: dict[str, Tensor], as_read: dict[str, Any], missing: set[str], target: TargetFacts
) -> _Files:
    """The head as engines read it, and put right; an output that is lost is borrowed from the target for the second."""
    stated, drafts = files.stated, files.drafts
    whole = stated.config.get("draft_vocab_size") in (None, stated.config["vocab_size"])
    meant_D = drafts.meant_D if drafts.meant_D is not None else drafts.served_D
    lost = [name for name in missing if name == OUTPUT or OUTPUTS.fullmatch(name)]
    served = mended = None
    if not lost and (whole or drafts.served_D is not None):
        served = assemble(stated.kind, as_read, named, drafts.served_D)
    if whole or meant_D is not None:
        named = named | _borrowed(stated, lost, target, meant_D)
        mended = assemble(stated.kind, stated.config, named, meant_D)
    return _Files(stated, drafts, served, mended)


def _borrowed(stated: Stated, names: list[str], target: TargetFacts, ids_D: Tensor | None) -> dict[str, Tensor]:
    """The rows of the target's output that a head's own output started as."""
    if not names:
        return {}
    rows_VH = TargetEnds.load(target.name, "float32", "cpu").lm_head_weight
    rows_DH = rows_VH if ids_D is None else rows_VH[ids_D]
    stacked = stated.kind == "medusa" and stated.config.get("output") == "own" and names == [OUTPUT]
    return {name: rows_DH.expand(stated.config["num_heads"], -1, -1) if stacked else rows_DH for name in names}


def fits(stated: Stated, target: TargetFacts) -> bool:
    """Whether the sizes are the target's."""
    sizes = stated.config.get("hidden_size"), stated.config.get("vocab_size")
    return sizes == (target.hidden_size, target.vocab_size)


def _probe(checkup: Checkup, files: _Files, text_source: TextSource) -> None:
    target, findings = checkup.target, checkup.findings
    assert target is not None
    if files.mended is None:
        sizes = "its sizes are not the target's"
        checkup.unprobed = "its files make no head that could draft" if fits(files.stated, target) else sizes
        return
    try:
        texts = text_source(target, checkup.folder)
    except HeadwayError as error:
        if checkup.sound:
            raise
        checkup.unprobed = str(error)  # a template that is another can refuse the texts
        return
    trial = Trial(checkup.folder, files.stated, target, files.drafts, findings)
    checkup.probed = trial.run(files.served, files.mended, texts)
