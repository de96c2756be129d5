"""Collection killed at random moments, and over ten times the rows: the same bytes, the same memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.collect import Settings, collect
from data_prep.store import FeatureStore
from tests.conftest import make_conversations, save_tiny_target, write_conversations
from tests.data_prep.collecting import ROOT, Make, contents

MEASURED = """
import sys
from data_prep.collect import main
main()
lines = open("/proc/self/status").read().splitlines()
print("peak", next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def begin(settings: Settings) -> int:
    """Start collecting in a process forked from this one, which has loaded everything; its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            collect(settings)
            code = 0
        finally:
            os._exit(code)  # nothing of the test's own end runs in here
    return child


def shards_in(folder: Path) -> int:
    return len(list(folder.glob("features-*.json")))


def wait_for(settings: Settings, child: int, source: random.Random, longest: float) -> bool:
    """Until a random moment of the run, or until some further shards are there; whether the process has ended by then."""
    moment = time.monotonic() + source.uniform(0, longest)
    wanted = shards_in(settings.out) + source.randint(1, 6) if source.random() < 0.7 else None
    while time.monotonic() < moment or wanted is not None:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        if wanted is not None and shards_in(settings.out) >= wanted:
            break
        time.sleep(0.0005)
    time.sleep(source.uniform(0, 0.004))  # a shard takes about as long: before, between and behind its two files
    return False


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_random_moments_leave_no_trace(collection: Make, tmp_path: Path, one_thread: None, kills: int) -> None:
    """SIGKILL again and again, always going on; every store that is finished between holds the bytes of an uninterrupted one."""
    source = random.Random(kills)
    file = write_conversations(tmp_path / "many.jsonl", make_conversations(120, seed=1))
    usual: dict[str, Any] = {"conversations": file, "shard_tokens": 150, "tap_format": "int8", "top_k_logits": 2}
    whole = collection(out=tmp_path / "whole", **usual)
    # Here: the CPU kernels are compiled by the first one who needs them, and a kill must not leave them locked.
    started = time.monotonic()
    collect(whole)
    longest, expected = time.monotonic() - started, contents(whole.out)
    assert shards_in(whole.out) > 30
    done = finished = begun = 0
    while done < kills:
        killed = collection(out=tmp_path / f"killed-{finished}", **usual)
        child = begin(killed)
        ended = wait_for(killed, child, source, longest)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if ended or not os.WIFSIGNALED(status):
            assert status == 0
            assert contents(killed.out) == expected
            shutil.rmtree(killed.out)
            finished += 1
        else:
            done += 1
            begun += 0 < shards_in(killed.out) < shards_in(whole.out)
    last = collection(out=tmp_path / f"killed-{finished}", **usual)
    assert os.waitpid(begin(last), 0)[1] == 0
    assert contents(last.out) == expected
    print(f"{done} kills, {begun} of them between the first shard and the last; {finished + 1} stores, all as expected")
    assert begun >= kills // 2


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The same rows once and ten times: the peak of the whole process within 5 %, where all states held would add 40."""
    wide = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 3}
    target = save_tiny_target(tmp_path / "target", tiny_tokenizer, **wide)
    rows = make_conversations(60, seed=5)
    peaks = []
    for times in (1, 10):
        repeated = [row | {"id": f"{row['id']}-{number}"} for number in range(times) for row in rows]
        file = write_conversations(tmp_path / f"{times}.jsonl", repeated)
        out = tmp_path / f"store-{times}"
        options = {"target": target, "conversations": file, "out": out, "taps": "0,1,2", "held_out": 0}
        options |= {"dtype": "float32", "store_dtype": "float32", "batch_tokens": 1024, "shard_tokens": 1024}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", MEASURED, *(f"--{name}={value}" for name, value in options.items())]
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        peaks.append(1024 * int(said.split("peak ")[1]))
        store = FeatureStore.open(out)
        assert len(store) == 60 * times
        assert shards_in(out) > 3
        states = store.tokens * store.layout.bytes_per_token()
    print(json.dumps({"peak_mb": [round(peak / 1e6) for peak in peaks], "states_mb": round(states / 1e6)}))
    assert states > 0.4 * peaks[0]
    assert peaks[1] < 1.05 * peaks[0]
