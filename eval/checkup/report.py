"""What an examination found, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from eval.checkup.acceptance import Acceptance
from eval.checkup.examine import Checkup

SCHEMA = 1


def as_json(checkup: Checkup) -> dict[str, Any]:
    """Schema 1: keys may be added, none changes its meaning.

    findings  {code, severity ("error", "warning"), where, what, mend}
    probe     null, or {texts, conversations, tokens, promised, floor, as_served, mended}: accepted lengths `tau` with `ci95` and
              `by_step`, of the head as an engine reads it and with what was found put right; `unprobed` says why there is none
    """
    probed, target = checkup.probed, checkup.target
    return {
        "schema": SCHEMA,
        "head": str(checkup.folder.path),
        "layout": checkup.folder.layout,
        "kind": checkup.kind,
        "target": None if target is None else {"name": target.name, "fingerprint": target.fingerprint},
        "sound": checkup.sound,
        "findings": [_without_mended(asdict(finding)) for finding in checkup.findings],
        "probe": None
        if probed is None
        else {
            "texts": probed.texts.source,
            "conversations": len(probed.texts.texts),
            "tokens": probed.texts.tokens,
            "promised": None if probed.promise is None else probed.promise.tau,
            "floor": probed.floor,
            "as_served": _figures(probed.served),
            "mended": _figures(probed.mended),
        },
        "unprobed": checkup.unprobed,
        "seconds": round(checkup.seconds, 2),
    }


def _without_mended(finding: dict[str, Any]) -> dict[str, Any]:
    return {key: str(value) for key, value in finding.items() if key != "mended"}


def _figures(found: Acceptance | None) -> dict[str, Any] | None:
    return None if found is None else {"tau": found.tau, "ci95": found.interval, "by_step": found.by_step}


def lines(checkup: Checkup) -> Iterator[str]:
    """The same in words."""
    target = "" if checkup.target is None else f", target '{checkup.target.name}'"
    yield f"{checkup.folder.path}: {checkup.folder.layout or 'unknown'} layout, kind {checkup.kind or 'unknown'}{target}"
    for finding in checkup.findings:
        yield f"{finding.severity}: {finding.code}"
        yield f"    where  {finding.where}"
        yield f"    what   {finding.what}"
        yield f"    mend   {finding.mend}"
    yield from _probe_lines(checkup)
    yield f"{'sound' if checkup.sound else 'NOT SOUND'} ({checkup.seconds:.0f} s)"


def _probe_lines(checkup: Checkup) -> Iterator[str]:
    probed = checkup.probed
    if probed is None:
        yield f"not probed: {checkup.unprobed}"
        return
    yield f"probe: {probed.texts.source}, {probed.texts.tokens} answer tokens"
    yield f"    as engines read it  {_tau(probed.served)}"
    if any(finding.mended for finding in checkup.findings):
        yield f"    mended              {_tau(probed.mended)}"
    if probed.promise is not None:
        yield f"    promised            {probed.promise.tau:.2f}; at least {probed.floor:.2f} is expected here"
    else:
        yield "    promised            nothing: no manifest with a validation"


def _tau(found: Acceptance | None) -> str:
    if found is None:
        return "drafts nothing that could be measured"
    shares = ", ".join("-" if share is None else f"{share:.0%}" for share in found.by_step)
    return f"{found.tau:.2f} tokens a round; accepted by step: {shares}"
