"""report.json has the shape other tools read; the pages show hostile text as text and need no network."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.ledger import Ledger, Output, Round
from eval.metrics import Costs
from eval.report import write_report
from eval.report.figures import describe_run
from eval.report.schema import Lossless, Report, Settings
from eval.report.table import notes, print_table

NUMBER = (int, float)
HOSTILE = "</script><script>alert(1)</script><b>&amp; | `x`"

# The contract with other tools, written down apart from the code: type or nested shape of every required key.
SHAPE: dict[str, Any] = {
    "schema": int,
    "target": {"name": str, "fingerprint": str, "dtype": str, "device": str},
    "protocol": dict,
    "runs": [
        {
            "drafter": str,
            "head": (str, type(None)),
            "settings": {
                "temperature": NUMBER,
                "top_p": NUMBER,
                "top_k": int,
                "batch_size": int,
                "draft_length": int,
                "tree": (list, type(None)),
            },
            "prompts": int,
            "tokens": int,
            "tau": {"micro": NUMBER, "macro": NUMBER, "ci95": (list, type(None))},
            "acceptance": {"conditional": list, "marginal": list},
            "speedup": {
                "decode": NUMBER,
                "end_to_end": NUMBER,
                "ci95": (list, type(None)),
                "predicted": (*NUMBER, type(None)),
            },
            "seconds": {"draft": NUMBER, "verify": NUMBER, "host": NUMBER},
            "lossless": {"greedy_identical": bool, "divergences": list},
        }
    ],
}


def check_shape(value: Any, shape: Any, where: str = "report") -> None:
    """Fail where a value lacks a key of the shape or has another type; further keys are allowed."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        for key, part in shape.items():
            assert key in value, f"{where}.{key} is missing"
            check_shape(value[key], part, f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            check_shape(item, shape[0], f"{where}[{index}]")
    else:
        assert isinstance(value, shape), f"{where}: {value!r}"
        assert not (isinstance(value, bool) and shape is int), where


def ledger(accepted: list[list[int]], drafted: int, pace: float) -> Ledger:
    """One prompt a list; its numbers are the accepted drafts of each round."""
    made = Ledger()
    for prompt, rounds in enumerate(accepted):
        made.rounds += [Round(prompt, 1, drafted, a, a + 1, None, pace / 10, pace * 0.8, pace / 10) for a in rounds]
        made.outputs.append(Output(prompt, [1] * (sum(rounds) + len(rounds) + 1), 0.2, "length"))
    return made


def sample_report(name: str = "tiny", pace: float = 0.12, differs: list[str] | None = None) -> Report:
    """A baseline and a run of four prompts."""
    baseline = ledger([[0] * 6] * 4, 0, 0.1)
    run = ledger([[2, 1], [1, 1, 0], [3, 0], [0, 0, 1, 1]], 3, pace)
    settings = Settings(temperature=0.0, top_p=1.0, top_k=0, batch_size=1, draft_length=3, tree=None)
    fine = Lossless(greedy_identical=True, greedy_differs=[], divergences=[], divergences_checked=True)
    found = Lossless(
        greedy_identical=not differs,
        greedy_differs=differs or [],
        divergences=[{"prompt": 2, "position": 5, "margin": 0.015}],
        divergences_checked=True,
    )
    return Report(
        schema=1,
        target={"name": name, "fingerprint": "ab" * 32, "dtype": "bfloat16", "device": "cpu"},
        protocol={"prompts": 4, "max_new_tokens": 7, "repeats": 1, "temperature": 0.0, "batch_size": 1},
        runs=[
            describe_run("none", None, settings, baseline, baseline, Costs(0.0, 0.9, 0.1), fine, seed=0),
            describe_run("medusa", f"heads/{name}", settings, run, baseline, Costs(0.1, 1.0, 0.1), found, seed=0),
        ],
        examples=[{"prompt": name, "outputs": {"none": name, "medusa": name}}],
        made_by={"versions": {"torch": "2"}},
    )


def test_report_json_has_the_shape_of_schema_1(tmp_path: Path) -> None:
    write_report(sample_report(), tmp_path / "new" / "folder")
    report = json.loads((tmp_path / "new" / "folder" / "report.json").read_text())
    check_shape(report, SHAPE)
    assert report["schema"] == 1
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["report.html", "report.json", "report.md"], "nothing temporary is left"


def test_figures_of_a_run_are_those_of_its_ledger() -> None:
    run = sample_report()["runs"][1]
    # 11 rounds accept 10 drafts and emit 21 tokens; each prompt adds one prefill token.
    assert (run["prompts"], run["rounds"], run["tokens"]) == (4, 11, 21 + 4)
    assert run["tau"]["micro"] == 21 / 11
    assert run["emitted"] == [0, 4, 5, 1, 1]
    assert run["acceptance"]["rate"] == 10 / 33
    assert run["speedup"]["decode"] == pytest.approx((21 / (11 * 0.12)) / (1 / 0.1))
    assert run["speedup"]["predicted"] == pytest.approx(21 / 11 / 1.2)
    assert run["verdict"] == "pays"


def test_a_run_that_does_not_pay_is_told_so_with_its_break_even() -> None:
    slow = sample_report(pace=0.5)
    assert slow["runs"][1]["verdict"] == "do not deploy: slower than no draft; it breaks even at tau 1.20"
    screen = io.StringIO()
    print_table(slow, Console(file=screen, width=200))
    assert "do not deploy" in screen.getvalue()


def test_console_table_shows_the_figures_and_what_differs() -> None:
    screen = io.StringIO()
    print_table(sample_report(name="[red]x", differs=["prompt 3 at token 7"]), Console(file=screen, width=200))
    shown = screen.getvalue()
    for text in ("1.91", "1.59x", "30 %", "NO", "prompt 3 at token 7", "heads/[red]x", "margin there at most 0.015"):
        assert text in shown


def test_a_measurement_far_from_its_prediction_is_pointed_out() -> None:
    assert not [note for note in notes(sample_report()) if "predicted" in note]
    (note,) = [note for note in notes(sample_report(pace=0.5)) if "predicted" in note]
    assert note.startswith("medusa (heads/tiny): measured 0.38x but 1.59x predicted")


class Reader(HTMLParser):
    """Collects a page's tags and the text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._raw = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.text.append(data)


def test_page_is_self_contained_and_hostile_text_is_only_text(tmp_path: Path) -> None:
    write_report(sample_report(), tmp_path / "plain")
    write_report(sample_report(name=HOSTILE), tmp_path / "hostile")
    pages = {}
    for kind in ("plain", "hostile"):
        pages[kind] = Reader()
        pages[kind].feed((tmp_path / kind / "report.html").read_text())
    tags = [tag for tag, _ in pages["hostile"].tags]
    assert tags == [tag for tag, _ in pages["plain"].tags], "hostile text made or broke a tag"
    assert HOSTILE in "".join(pages["hostile"].text)
    for tag, attributes in pages["hostile"].tags:
        assert "src" not in attributes, (tag, attributes)
        assert tag != "link"
    table = (tmp_path / "hostile" / "report.md").read_text().split("| drafter")[1].split("\n\n")[0]
    assert {line.replace(r"\|", "").count("|") for line in table.splitlines()[1:]} == {9}


def test_nothing_is_written_for_a_figure_that_is_not_finite(tmp_path: Path) -> None:
    report = sample_report()
    report["runs"][1]["seconds"]["draft"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(report, tmp_path / "out")
    assert not (tmp_path / "out").exists()
