"""The probe: what the head drafts on real texts, as it is and mended, and which likely repair makes it draft better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from eval.checkup.acceptance import HALF_MAX, Acceptance, accepted, better, largest_value, surely_more
from eval.checkup.draft_map import DraftMap, ids_by_rows
from eval.checkup.finding import WARNING, Code, Finding
from eval.checkup.folder import HeadFolder
from eval.checkup.patient import Patient
from eval.checkup.repairs import Repair, repairs, ropes, rows_of
from eval.checkup.stated import Stated
from eval.checkup.texts import ProbeTexts
from heads.errors import HeadwayError
from heads.formats.layout import TargetFacts

STEPS = 4
MOST_REPAIRS = 3  # faults at once that are looked for by trying
SHARE, SHARE_ELSEWHERE = 0.8, 0.5
"""Of the promised accepted tokens a round: what must be there on the texts of the promise, and on others."""
NOTHING = 0.05  # accepted tokens a round that are as good as none
TRIED = (Code.TAPS, Code.TAPS_MISSING, Code.D2T_ABSOLUTE, Code.MAP_IDENTITY, Code.MAP)
"""Found, but not how to mend it: a repair may tell."""
FOREIGN = (Code.OTHER_TARGET, Code.OTHER_TOKENIZER, Code.OTHER_TEMPLATE)
TENSORS = ("d2t", "token_map", "heads")


@dataclass(frozen=True)
class Promise:
    """What a head's manifest says it was worth on held-out conversations."""

    tau: float
    steps: int

    @staticmethod
    def of(manifest: dict[str, Any]) -> Promise | None:
        """None where the manifest has no validation."""
        best = manifest.get("best") or manifest.get("validation") or {}
        tau, by_step = best.get("replayed_tau"), best.get("replayed_acceptance")
        return Promise(float(tau), len(by_step)) if isinstance(tau, int | float) and by_step else None


@dataclass(frozen=True)
class Probed:
    """`served`: as an engine reads the files, None where it cannot; `mended`: with all that was found put right."""

    texts: ProbeTexts
    served: Acceptance | None
    mended: Acceptance | None
    promise: Promise | None
    floor: float | None

    @property
    def holds(self) -> bool:
        """Whether the mended head is worth what was promised; without a promise, whether it drafts anything."""
        return self.mended is not None and _holds(self.mended, self.floor)


def _holds(found: Acceptance, floor: float | None) -> bool:
    if floor is None:
        return float(found.depth_R.mean()) > NOTHING
    return max(found.tau, found.interval[1] if found.interval else found.tau) >= floor


class Trial:
    """One head on one set of texts. `findings` grows by what the probe finds, and some of them are decided by it."""

    def __init__(
        self, folder: HeadFolder, stated: Stated, target: TargetFacts, drafts: DraftMap, findings: list[Finding]
    ) -> None:
        self._folder, self._stated, self._target, self._drafts = folder, stated, target, drafts
        self.findings = findings
        self._promise = Promise.of(folder.manifest)

    def run(self, served: Patient | None, mended: Patient, texts: ProbeTexts) -> Probed:
        """Measure both; where the mended one falls short, or nothing was promised, try what else could be wrong."""
        floor = None
        if self._promise is not None:
            share = SHARE if texts.validated else SHARE_ELSEWHERE
            floor = 1 + share * (self._promise.tau - 1)
        measure = self._measure(texts)
        now = measure(mended)
        same = served is not None and served.is_same(mended)
        as_served = now if same else None if served is None else self._as_served(served, measure)
        self._overflow(mended, texts)
        if now is not None and self._could_be_mended():
            if floor is None or not _holds(now, floor):
                mended, now = self._try(mended, now, texts, measure)
            self._doubt_rope(mended, now, texts, measure)
        probed = Probed(texts, as_served, now, self._promise, floor)
        self._decide(probed)
        return probed

    def _could_be_mended(self) -> bool:
        """Whether nothing is known that makes the probe tell of something else than the head's config and maps."""
        return all(finding.mended or finding.severity == WARNING or finding.code in TRIED for finding in self.findings)

    def _measure(self, texts: ProbeTexts) -> Callable[[Patient], Acceptance | None]:
        def measure(patient: Patient) -> Acceptance | None:
            if set(patient.config.get("taps") or ()) - set(texts.taps):
                return None
            head = patient.build(self._folder.path).to(texts.device)
            return accepted(head, texts.ends, texts.texts, self._steps(patient))

        return measure

    def _as_served(self, served: Patient, measure: Callable[[Patient], Acceptance | None]) -> Acceptance | None:
        try:
            return measure(served)
        except HeadwayError:  # what is wrong with it has been found, and is put right in the mended one
            return None

    def _steps(self, patient: Patient) -> int:
        if patient.kind == "medusa":
            return int(patient.config["num_heads"])
        return self._promise.steps if self._promise is not None else STEPS

    def _try(
        self, patient: Patient, now: Acceptance, texts: ProbeTexts, measure: Callable[[Patient], Acceptance | None]
    ) -> tuple[Patient, Acceptance]:
        for _ in range(MOST_REPAIRS):
            tried = [
                (found, repair)
                for repair in self._repairs(patient, texts)
                if (found := measure(repair.patient)) is not None and better(found, now)
            ]
            if not tried:
                break
            best, repair = max(tried, key=lambda pair: float(pair[0].depth_R.mean()))
            self._name(repair, now, best)
            patient, now = repair.patient, best
        return patient, now

    def _repairs(self, patient: Patient, texts: ProbeTexts) -> list[Repair]:
        drafts, output = self._drafts, rows_of(patient)
        if drafts.served_D is not None and "t2d" not in drafts.others and output is not None:
            ids_D = ids_by_rows(output, texts.ends.lm_head_weight.cpu())
            drafts = drafts if ids_D is None else replace(drafts, others=drafts.others | {"rows": ids_D})
        return repairs(patient, self._folder, self._stated, self._target, texts, drafts)

    def _name(self, repair: Repair, before: Acceptance, after: Acceptance) -> None:
        place = self._folder.weights if repair.key in TENSORS else self._folder.config_file
        rise = f"the probe's accepted length rises from {before.tau:.2f} to {after.tau:.2f} with the repair"
        where = f"{place}: `{repair.key}`"
        finding = Finding(repair.code, where, f"{repair.what}; {rise}", repair.mend, mended=True)
        self.findings[:] = [old for old in self.findings if old.code is not repair.code] + [finding]

    def _doubt_rope(
        self,
        patient: Patient,
        now: Acceptance,
        texts: ProbeTexts,
        measure: Callable[[Patient], Acceptance | None],
    ) -> None:
        """A rope of its own, that no paper explains: silent where the head drafts better with it than with the target's."""
        known = (self._folder.trained.get("config") or {}).get("rope_parameters") is not None
        if known or patient.kind == "medusa":
            return
        for repair in ropes(patient, self._stated, self._target):
            changed = measure(repair.patient)
            if changed is not None and not surely_more(now, changed):
                where = f"{self._folder.config_file}: `{repair.key}`"
                what = f"{repair.what}, the target's is another; on these texts both draft alike"
                self.findings.append(Finding(Code.ROPE, where, what, repair.mend, WARNING))

    def _decide(self, probed: Probed) -> None:
        """What falls short and is explained by nothing; a target that is another, and serves the head as well."""
        decided = []
        for finding in self.findings:
            alone = finding.code is Code.OTHER_TARGET and not any(other.code in FOREIGN[1:] for other in self.findings)
            if alone and probed.texts.live and probed.floor is not None and probed.holds:
                what = f"{finding.what}: tuned since, it seems; what it accepts is still what was promised"
                finding = replace(finding, what=what, severity=WARNING)
            borrowed = finding.code is Code.LM_HEAD_LOST and str(self._folder.weights) in finding.where
            if borrowed and not finding.mended and probed.floor is not None and probed.holds:
                what = f"{finding.what}; with the target's own rows in its place it drafts what was promised"
                finding = replace(finding, what=what, mend="write the target's output rows there")
            decided.append(finding)
        self.findings[:] = decided
        explained = any(finding.severity != WARNING and not finding.mended for finding in self.findings)
        if probed.mended is None or probed.holds or explained:
            return
        promised = "" if probed.promise is None else f" where its manifest promises {probed.promise.tau:.2f}"
        what = f"{probed.mended.tau:.2f} tokens a round{promised}, and no likely repair changes it"
        mend = "give the target and the texts that it was trained for; else train it again"
        self.findings.append(Finding(Code.LOW_ACCEPTANCE, str(self._folder.path), what, mend))

    def _overflow(self, patient: Patient, texts: ProbeTexts) -> None:
        """Values on the way that float16, in which the file is stored, cannot hold."""
        if not any(entry.dtype == "float16" for entry in self._folder.entries.values()):
            return
        if set(patient.config.get("taps") or ()) - set(texts.taps):
            return
        head = patient.build(self._folder.path).to(texts.device)
        value, name = largest_value(head, texts.ends, texts.texts[0], self._steps(patient))
        if value > HALF_MAX:
            what = f"stored in float16, and its `{name}` reaches {value:.3g}, above {HALF_MAX:.0f}: infinite when served so"
            self.findings.append(
                Finding(Code.OVERFLOW, str(self._folder.weights), what, "serve and store it in bfloat16 or float32")
            )
