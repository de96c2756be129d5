"""Regeneration killed and started again: whatever is there, only the rest is asked for, and the file is the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from data_prep.journal import Journal
from data_prep.regenerate import Settings, regenerate
from heads.errors import HeadwayError
from tests.conftest import write_conversations
from tests.data_prep.fake_server import FakeServer
from tests.data_prep.regenerating import MODEL, ROOT, Make, Serve, as_expected, make_prompts, work_of


def started(settings: Settings, *more: str) -> subprocess.Popen[str]:
    """The script in a process of its own."""
    given = {"prompts": settings.prompts, "out": settings.out, "target": settings.target, "server": settings.server}
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return subprocess.Popen(
        [sys.executable, "data_prep/regenerate.py", *arguments, "--model", MODEL, "--max_new_tokens", "64", *more],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_and_started_again(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """kill -9 in the middle, and a last line that was only half written."""
    server = serve(delay=0.05)
    given = regeneration(server=server.url)
    process = started(given, "--concurrency", "4")
    while not work_of(given).exists() or len(work_of(given).read_bytes().splitlines()) < 15:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not given.out.exists()
    content = work_of(given).read_bytes()
    *lines, last = content.splitlines(keepends=True)
    work_of(given).write_bytes(b"".join(lines) + last[: len(last) // 2])
    server.bodies.clear()
    process = started(given)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "the last line was cut when the last run stopped" in out
    assert as_expected(given, tiny_tokenizer, make_prompts(24))
    assert len(server.bodies) == 48 - (len(lines) - 1)
    assert not work_of(given).exists()


def interrupted(settings: Settings, server: FakeServer) -> int:
    """A run that stops after some answers; how many."""
    stop_at = len(server.bodies) + 25
    server.spoil = lambda body, number: "400" if number > stop_at else "fine"
    with pytest.raises(HeadwayError, match="status 400"):
        regenerate(settings)
    server.spoil = lambda body, number: "fine"
    return len(work_of(settings).read_bytes().splitlines()) - 1


def test_rows_filtered_and_reordered_between_runs(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """cases.md 12: an answer belongs to its conversation's id and prompt, never to a place in the file."""
    server = serve()
    given = regeneration(server=server.url)
    done = interrupted(given, server)
    assert 15 < done <= 25
    rows = make_prompts(24)
    recorded = {json.loads(line)["id"] for line in work_of(given).read_bytes().splitlines()[1:]}
    kept = [row for number, row in enumerate(rows) if number % 5]
    random.Random(1).shuffle(kept)
    changed = next(row for row in kept if row["id"] in recorded)  # the same id, another question
    changed["messages"] = [{"role": "user", "content": "what is the moon made of"}]
    write_conversations(given.prompts, kept)
    server.bodies.clear()
    regenerate(given)
    assert as_expected(given, tiny_tokenizer, kept)
    turns = sum(message["role"] == "user" for row in kept for message in row["messages"])
    assert turns - done < len(server.bodies) < turns
    assert sum(body["messages"] == changed["messages"] for body in server.bodies) == 1


def test_every_place_to_stop(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """A work file of any number of lines, and half of the next one: the same bytes, and only the rest is asked for."""
    server = serve()
    given = regeneration(server=server.url)
    interrupted(given, server)
    regenerate(given)
    whole = given.out.read_bytes()
    given.out.unlink()
    interrupted(given, server)
    lines = work_of(given).read_bytes().splitlines(keepends=True)
    for kept in (0, 1, len(lines) // 2, len(lines) - 1):
        work_of(given).write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        server.bodies.clear()
        regenerate(given)
        assert given.out.read_bytes() == whole
        assert len(server.bodies) == 48 - max(0, kept - 1)
        given.out.unlink()


def test_other_settings_and_foreign_files(regeneration: Make, serve: Serve) -> None:
    server = serve()
    given = regeneration(server=server.url)
    interrupted(given, server)
    with pytest.raises(
        HeadwayError, match=r"out\.jsonl\.work: line 1: was begun with other settings \(.*temperature 0\.0, now 0\.5"
    ):
        regenerate(regeneration(server=server.url, temperature=0.5))
    with (
        Journal(work_of(given), json.loads(work_of(given).read_bytes().splitlines()[0])),
        pytest.raises(HeadwayError, match="another process is writing it"),
    ):
        regenerate(given)
    lines = work_of(given).read_bytes().splitlines(keepends=True)
    work_of(given).write_bytes(lines[0] + b"{]\n" + b"".join(lines[2:]))
    with pytest.raises(HeadwayError, match=r"out\.jsonl\.work: line 2: is not what was written there"):
        regenerate(given)
    work_of(given).unlink()
    given.out.write_text("something of the user's", encoding="utf-8")
    with pytest.raises(HeadwayError, match=r"out\.jsonl: is there already"):
        regenerate(given)
    assert given.out.read_text(encoding="utf-8") == "something of the user's"
