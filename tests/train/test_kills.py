"""Case 13: a training run that is struck by SIGKILL at random moments and started again ends with the same bits.

.venv/bin/python -m pytest -s -m slow tests/train/test_kills.py     30 times
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.train.conftest import metrics, weights
from tests.train.launching import ROOT, environment


def struck(recipe_file: Path, folder: Path, kills: int, record: Callable[[str, object], None]) -> None:
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe["optim"] |= {"batch_tokens": 256, "epochs": 2 + kills // 2}
    recipe["save"]["every"] = 2
    recipe_file.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, str(ROOT / "tests" / "train" / "kills.py"), str(recipe_file), str(folder / "struck")]
    command += [str(kills), "11"]
    made = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True, timeout=3000)
    assert made.returncode == 0, made.stdout + made.stderr
    facts = json.loads(made.stdout.splitlines()[-1])
    record("kills", facts)
    print(f"killed {facts['kills']} times: {facts}")
    assert facts["kills"] == kills
    one, other = folder / "struck", folder / "struck-alone"
    assert weights(one) == weights(other)
    for kind in ("train", "validation"):
        rows = [[(row["step"], row["loss"]) for row in metrics(out, kind)] for out in (one, other)]
        assert rows[0] == rows[1]
    names = [sorted(path.name for path in (out / "checkpoints").iterdir()) for out in (one, other)]
    assert names[0] == names[1]  # the last checkpoints and the best, nothing half written


def test_three_kills(recipe_file: Path, tmp_path: Path, record_property: Callable[[str, object], None]):
    struck(recipe_file, tmp_path, 3, record_property)


@pytest.mark.slow
def test_thirty_kills(recipe_file: Path, tmp_path: Path, record_property: Callable[[str, object], None]):
    struck(recipe_file, tmp_path, 30, record_property)
