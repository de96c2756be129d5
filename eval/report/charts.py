"""The charts of report.html, as plotly figures. Names in them are escaped: plotly reads a little HTML in labels."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go

from eval.report.schema import Report, Run, label

COLOURS = ["#4c566a", "#2f7ed8", "#d9782d", "#2a9d5c", "#a0479b", "#c23b4b", "#7a8b2e", "#3aa7b5"]


def charts(report: Report) -> list[tuple[str, go.Figure]]:
    """Headings and figures, in reading order."""
    runs = report["runs"]
    return [
        ("Speedup over the baseline loop", _speedup(runs)),
        ("Mean accepted length", _tau(runs)),
        ("Acceptance by depth", _acceptance(runs)),
        ("Where a round's time goes", _time(runs)),
        ("Decode speedup of each prompt", _prompts(runs)),
    ]


def _figure(x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=360,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        xaxis_title=x,
        yaxis_title=y,
        legend={"orientation": "h", "y": 1.12},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure


def _named(runs: list[Run]) -> list[tuple[str, str, Run]]:
    """Label, colour and run; a run keeps its colour in every chart."""
    return [(escape(label(run)), COLOURS[index % len(COLOURS)], run) for index, run in enumerate(runs)]


def _whiskers(value: float | None, interval: list[float] | None) -> dict[str, object]:
    """Error bar of one value."""
    if value is None or interval is None:
        return {}
    return {"type": "data", "array": [interval[1] - value], "arrayminus": [value - interval[0]], "symmetric": False}


def _speedup(runs: list[Run]) -> go.Figure:
    figure = _figure("", "tokens/s over the baseline's")
    for name, colour, run in _named(runs):
        speed = run["speedup"]
        bars = (
            ("decode", speed["decode"], speed["ci95"], 1.0),
            ("end to end", speed["end_to_end"], speed["end_to_end_ci95"], 0.65),
            ("predicted", speed["predicted"], None, 0.35),
        )
        for kind, value, interval, opacity in bars:
            figure.add_bar(
                x=[[name], [kind]],
                y=[value],
                error_y=_whiskers(value, interval),
                marker_color=colour,
                opacity=opacity,
                showlegend=False,
            )
    figure.add_hline(y=1, line_dash="dot", line_color="#888")
    return figure


def _tau(runs: list[Run]) -> go.Figure:
    figure = _figure("", "tokens per verification pass")
    for name, colour, run in _named(runs):
        tau = run["tau"]
        bar = _whiskers(tau["micro"], tau["ci95"])
        figure.add_bar(x=[name], y=[tau["micro"]], error_y=bar, marker_color=colour, showlegend=False)
    return figure


def _acceptance(runs: list[Run]) -> go.Figure:
    figure = _figure("depth", "share accepted")
    for name, colour, run in _named(runs):
        found = run["acceptance"]
        depths = list(range(1, len(found["marginal"]) + 1))
        if not depths:
            continue
        for kind, values, dash in (
            ("conditional", found["conditional"], "solid"),
            ("marginal", found["marginal"], "dot"),
        ):
            figure.add_scatter(
                x=depths,
                y=values,
                name=f"{name}, {kind}",
                mode="lines+markers",
                line={"color": colour, "dash": dash},
            )
    figure.update_yaxes(range=[0, 1.02])
    figure.update_xaxes(dtick=1)
    return figure


def _time(runs: list[Run]) -> go.Figure:
    figure = _figure("", "milliseconds per round")
    names = [name for name, _, _ in _named(runs)]
    for part, colour in (("draft", "#d9782d"), ("verify", "#2f7ed8"), ("host", "#9aa3ad")):
        heights = [1000 * run["seconds"][part] / run["rounds"] if run["rounds"] else None for run in runs]
        figure.add_bar(x=names, y=heights, name=part, marker_color=colour)
    figure.update_layout(barmode="stack")
    return figure


def _prompts(runs: list[Run]) -> go.Figure:
    figure = _figure("", "tokens/s over the baseline's")
    for name, colour, run in _named(runs):
        if run["drafter"] == "none":
            continue
        figure.add_box(
            y=run["speedup"]["per_prompt"],
            name=name,
            marker_color=colour,
            boxpoints="all",
            jitter=0.5,
            pointpos=0,
            showlegend=False,
        )
    figure.add_hline(y=1, line_dash="dot", line_color="#888")
    return figure
