"""The demo's figures as a result file: what `make demo` measured, and how long training and measuring took.

python benchmarks/demo.py          # after `make demo`; writes benchmarks/results/eagle-demo.json
"""

from __future__ import annotations

import json
from pathlib import Path

from results_file import write_result

from heads.errors import HeadwayError, run_script

DEMO = Path(__file__).resolve().parents[1] / "artifacts" / "demo"
STATIONS = (".collected", ".trained", ".eagle", ".measured")  # stamps of the Makefile, touched when a station ends


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
    collected, medusa, eagle, measured = ((DEMO / stamp).stat().st_mtime for stamp in STATIONS)
    seconds = {"train_medusa": medusa - collected, "train_eagle3": eagle - medusa, "measure": measured - eagle}
    heads = content["made_by"]["heads"]
    write_result("eagle-demo", {"target": content["target"], "runs": runs, "station_seconds": seconds, "heads": heads})


if __name__ == "__main__":
    run_script(main)
