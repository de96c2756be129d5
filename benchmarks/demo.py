"""The demo's figures as a result file: what `make demo` measured, and how long training and measuring took.

python benchmarks/demo.py          # after `make demo`; writes benchmarks/results/line-demo.json
"""

from __future__ import annotations

import json
from pathlib import Path

from results_file import write_result

from heads.errors import HeadwayError, run_script

DEMO = Path(__file__).resolve().parents[1] / "artifacts" / "demo"
STATIONS = (".collected", ".trained", ".measured")  # stamps of the Makefile, touched when a station ends


def main() -> None:
    report = DEMO / "report" / "report.json"
    if not report.is_file():
        raise HeadwayError(f"{report}: no such report; run `make demo` first")
    content = json.loads(report.read_text(encoding="utf-8"))
    kept = ("drafter", "settings", "prompts", "tokens", "tau", "acceptance", "speedup", "seconds", "rounds", "verdict")
    runs = [
        {key: run[key] for key in kept} | {"greedy_identical": run["lossless"]["greedy_identical"]}
        for run in content["runs"]
    ]
    collected, trained, measured = ((DEMO / stamp).stat().st_mtime for stamp in STATIONS)
    seconds = {"train": trained - collected, "measure": measured - trained}
    heads = content["made_by"]["heads"]
    write_result("line-demo", {"target": content["target"], "runs": runs, "station_seconds": seconds, "heads": heads})


if __name__ == "__main__":
    run_script(main)
