"""The report's table, for the console and for Markdown."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.report.schema import Report, Run, label

HEADERS = [
    "drafter",
    "tau [95 %]",
    "acceptance",
    "decode speedup [95 %]",
    "end to end",
    "predicted",
    "slower than 1x",
    "identical in fp32",
]
GAP = 1.25  # a measured and a predicted speedup further apart than this are not to be believed


def cells(run: Run) -> list[str]:
    """One row, as text."""
    speed = run["speedup"]
    return [
        label(run),
        _number(run["tau"]["micro"], run["tau"]["ci95"]),
        _percent(run["acceptance"]["rate"]),
        _number(speed["decode"], speed["ci95"], "x"),
        _number(speed["end_to_end"], None, "x"),
        _number(speed["predicted"], None, "x"),
        _percent(speed["slower_share"]),
        "yes" if run["lossless"]["greedy_identical"] else "NO",
    ]


def print_table(report: Report, console: Console) -> None:
    """Print one row a run, and the verdicts that are not plain."""
    target, protocol = report["target"], report["protocol"]
    table = Table(
        title=f"{target['name']}, {target['dtype']} on {target['device']}: {protocol['prompts']} prompts x "
        f"{protocol['max_new_tokens']} tokens, {protocol['repeats']} repeats"
    )
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "drafter" else "right")
    for run in report["runs"]:
        table.add_row(*map(Text, cells(run)))  # Text: a folder's name is no markup
    console.print(table)
    for note in notes(report):
        console.print(Text(note), soft_wrap=True)


def notes(report: Report) -> list[str]:
    """Lines to read beside the table: verdicts, gaps to the prediction, divergences, loops, failed identity."""
    lines = []
    for run in report["runs"]:
        name = label(run)
        measured, predicted = run["speedup"]["decode"], run["speedup"]["predicted"]
        if measured and predicted and not 1 / GAP < measured / predicted < GAP:
            lines.append(
                f"{name}: measured {measured:.2f}x but {predicted:.2f}x predicted from its tau and the costs calibrated "
                "before: the machine was busy with something else, or costs grow with the length; measure again"
            )
        if run["drafter"] != "none" and run["verdict"] != "pays":
            lines.append(f"{name}: {run['verdict']}")
        if run["loops"]:
            lines.append(f"{name}: {len(run['loops'])} of {run['prompts']} texts fell into a repetition loop")
        if found := run["lossless"]["divergences"]:
            widest = max(divergence["margin"] for divergence in found)
            lines.append(
                f"{name}: {len(found)} of {run['prompts']} texts leave the baseline's in {report['target']['dtype']}, "
                f"the target's top-2 margin there at most {widest:.3g}"
            )
        lines.extend(f"{name}: NOT IDENTICAL in fp32: {difference}" for difference in run["lossless"]["greedy_differs"])
    return lines


def _number(value: float | None, interval: list[float] | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:.2f}{unit}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
