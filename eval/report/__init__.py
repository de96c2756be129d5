"""Reports: what a measurement found, for tools (report.json), for readers (report.md, report.html), for the console."""

from __future__ import annotations

import json
from pathlib import Path

from eval.report.page import page
from eval.report.schema import Report
from eval.report.text import markdown
from heads.errors import atomic_write_text


def write_report(report: Report, folder: Path) -> None:
    """Write report.html, report.md and, last, report.json into `folder`, each atomically.

    report.json is the one that says the others are there. Raises ValueError for a figure that is not finite.
    """
    text = json.dumps(report, indent=1, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / "report.html", page(report))
    atomic_write_text(folder / "report.md", markdown(report))
    atomic_write_text(folder / "report.json", text + "\n")
