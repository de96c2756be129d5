"""report.html: one file that needs no network. Every text from a model, a prompt or a path is escaped."""

from __future__ import annotations

import json
from html import escape

from eval.report.charts import charts
from eval.report.schema import Report, label
from eval.report.table import HEADERS, cells, notes

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35em .6em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top }
td { white-space: nowrap } td:first-child { white-space: normal }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f7f8; padding: .6em; margin: .3em 0 }
.note { color: #8a4b08 } details { margin: .6em 0 } summary { cursor: pointer }
"""


def page(report: Report) -> str:
    """The report as one HTML page, plotly's script included."""
    target = report["target"]
    title = f"{target['name']}: speculative decoding"
    rows = "".join("<tr>" + _cells("td", cells(run)) + "</tr>" for run in report["runs"])
    figures = "".join(
        f"<h2>{escape(heading)}</h2>"
        + figure.to_html(full_html=False, include_plotlyjs=index == 0, config={"displayModeBar": False})
        for index, (heading, figure) in enumerate(charts(report))
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(target['name'])}</h1>"
        f"<p>{escape(target['dtype'])} on {escape(target['device'])}, fingerprint "
        f"<code>{escape(target['fingerprint'][:16])}</code></p>"
        f"<table><tr>{_cells('th', HEADERS)}</tr>{rows}</table>"
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes(report))
        + figures
        + _examples(report)
        + _details("How this was measured", {"protocol": report["protocol"], "made by": report["made_by"]})
        + _details("All figures", {label(run): run for run in report["runs"]})
        + "</body></html>\n"
    )


def _cells(tag: str, items: list[str]) -> str:
    return "".join(f"<{tag}>{escape(item)}</{tag}>" for item in items)


def _examples(report: Report) -> str:
    if not report["examples"]:
        return ""
    parts = ["<h2>Texts</h2>"]
    for example in report["examples"]:
        outputs = "".join(
            f"<p>{escape(name)}</p><pre>{escape(text)}</pre>" for name, text in example["outputs"].items()
        )
        parts.append(f"<details><summary>{escape(example['prompt'][-120:])}</summary>{outputs}</details>")
    return "".join(parts)


def _details(heading: str, content: dict[str, object]) -> str:
    text = escape(json.dumps(content, indent=1))
    return f"<details><summary>{escape(heading)}</summary><pre>{text}</pre></details>"
