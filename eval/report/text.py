"""report.md: the table and what to know beside it."""

from __future__ import annotations

import re

from eval.report.schema import Report, label
from eval.report.table import HEADERS, cells, notes


def markdown(report: Report) -> str:
    """The report as Markdown."""
    target, protocol = report["target"], report["protocol"]
    setting = (
        f"{target['dtype']} on {_plain(target['device'])}, fingerprint `{target['fingerprint'][:16]}`. "
        f"{protocol['prompts']} prompts x {protocol['max_new_tokens']} tokens, {protocol['repeats']} repeats, "
        f"temperature {protocol['temperature']:g}, batch {protocol['batch_size']}."
    )
    lines = [
        f"# {_plain(target['name'])}",
        "",
        setting,
        "",
        _row(HEADERS),
        _row(["---", *["---:"] * (len(HEADERS) - 1)]),
        *(_row([_plain(cell) for cell in cells(run)]) for run in report["runs"]),
        "",
        *(f"* {_plain(note)}" for note in notes(report)),
        "",
        "## Acceptance by depth",
        "",
        "Conditional (marginal): the share accepted of those offered whose drafts before were accepted (of all rounds",
        "that drafted).",
        "",
    ]
    for run in report["runs"]:
        if pairs := list(zip(run["acceptance"]["conditional"], run["acceptance"]["marginal"], strict=True)):
            depths = ", ".join(f"{'-' if c is None else f'{c:.2f}'} ({m:.2f})" for c, m in pairs)
            lines.append(f"* {_plain(label(run))}: {depths}")
    return "\n".join(lines) + "\n"


def _row(items: list[str]) -> str:
    return "| " + " | ".join(items) + " |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))
