"""The demo's EAGLE-3 head and a plain Medusa head, served by a real vLLM (benchmarks/served_heads.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.served_heads import measure

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "artifacts" / "demo"
PROMPTS, WITHIN = 40, 0.03


@pytest.fixture(scope="module")
def medusa() -> Path:
    """Heads that vLLM can load: the demo's own are Hydra heads. Minutes to train, the first time."""
    out = DEMO / "medusa-plain"
    options = ["--head.hydra=false", "--head.num_heads=4", f"--out={out}"]
    subprocess.run([sys.executable, "train/medusa.py", *options], cwd=ROOT, check=True)
    return out


@pytest.mark.servers
def test_served_heads_change_no_word_and_accept_what_ours_accept(medusa: Path, tmp_path: Path):
    figures = measure([str(DEMO / "eagle3"), str(medusa)], count=PROMPTS, log=str(tmp_path / "server.log"))
    assert [run["kind"] for run in figures["runs"]] == ["eagle3", "medusa"]
    for run in figures["runs"]:
        assert run["answers_against_engine_alone"]["identical"] == PROMPTS, run
        assert run["engine"]["rounds"] > 10 * PROMPTS
        assert run["engine_over_ours"] == pytest.approx(1, abs=WITHIN), run
