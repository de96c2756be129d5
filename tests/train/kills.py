"""A training run that SIGKILL strikes at random moments: python tests/train/kills.py RECIPE OUT KILLS SEED

Prints what happened as one line of JSON: `kills`, how many; `steps`, the last step logged at each; `starting`, those before the
first step of a life; `half_written`, checkpoints that a kill left half written; `seconds` of all lives. Each life is a fork of
this process, which has imported everything and run nothing, so that a life is training and little else.

The k-th of N kills comes when about the k-th N-th of the run is done, at a random moment within the steps that follow (their
time, validation and saving included, as measured on a first life that is left alone, in OUT-alone); every fifth one comes while
a life is still starting.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from heads import linear
from train import medusa
from train.logs import METRICS

STEPS = 4  # a kill falls within the time of so many


def begin(recipe: str, out: Path) -> int:
    """The process of a new life."""
    if process := os.fork():
        return process
    with out.with_suffix(".log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = ["medusa.py", f"--config={recipe}", f"--out={out}"]
    code = 1
    try:
        medusa.main()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def last_step(out: Path) -> int:
    path = out / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(steps, default=0)


def wait(process: int, until: Callable[[], bool]) -> int | None:
    """Wait for `until`; the exit status where the process ended first."""
    while not until():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    return None


class Moment:
    """Comes after so many seconds, and at the latest at step `latest`, should the machine have become faster."""

    def __init__(self, out: Path, latest: int, seconds: float) -> None:
        self.out, self.latest, self.deadline = out, latest, time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() > self.deadline or last_step(self.out) >= self.latest


def main(recipe: str, out: Path, kills: int, seed: int) -> None:
    linear._built = False  # no life waits for kernels to be compiled
    source, began = random.Random(seed), time.monotonic()
    alone = out.with_name(f"{out.name}-alone")
    process = begin(recipe, alone)
    assert wait(process, lambda: last_step(alone) > 0) is None
    starting = time.monotonic() - began
    assert os.waitpid(process, 0)[1] == 0, alone.with_suffix(".log").read_text()
    total = last_step(alone)
    per_step = (time.monotonic() - began - starting) / total
    facts = {"kills": 0, "steps": [], "starting": 0, "half_written": 0, "total": total}
    for number in range(kills):
        before = last_step(out)
        process = begin(recipe, out)
        if number % 5 == 4:
            ended = wait(process, Moment(out, before + STEPS, source.uniform(0, starting)))
            facts["starting"] += last_step(out) <= before
        else:
            goal = max(before + 1, round((number + 1) / (kills + 1) * (total - 3 * STEPS)))
            ended = wait(process, lambda goal=goal: last_step(out) >= goal)
            if ended is None:
                ended = wait(process, Moment(out, goal + STEPS, source.uniform(0, STEPS * per_step)))
        assert ended is None, (number, ended, out.with_suffix(".log").read_text()[-2000:])
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        facts["kills"] += 1
        facts["steps"].append(last_step(out))
        facts["half_written"] += len(list(out.glob("checkpoints/.partial-*")))
    assert os.waitpid(begin(recipe, out), 0)[1] == 0, out.with_suffix(".log").read_text()[-2000:]
    print(json.dumps({**facts, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
