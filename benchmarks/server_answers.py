"""200 prompts answered by a real vLLM server through data_prep/regenerate.py, killed twice on the way.

    python benchmarks/server_answers.py        # writes benchmarks/results/data-server.json, about 5 minutes on 2 cores

The client is killed in the middle and started again; then the server is killed, the client stops with an error, both are
started again. What was recorded before each kill must stand in the result unchanged, each prompt once, in order. Then every
token the server wrote is looked up in one teacher-forced fp32 pass of ours: it should be our argmax. Where it is not, the
gap between our best logit and the token's must be within what fp32 rounding can do: four times the largest difference
between our fp32 and float64 logits over FLOAT64 of the conversations (two logits, each with an error of our pass and one
of the server's).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm_server import PACKAGE, EngineServer, vllm_server

from data_prep.conversations import SAMPLES, Conversation, read_conversations, render_all
from heads.embedded import embedded_folder
from heads.target import Target

ROOT = Path(__file__).resolve().parents[1]
FLOAT64 = 6  # conversations whose logits are computed in float64 too
LISTED = 50  # tokens that are not our argmax, at most


@dataclass(frozen=True)
class Run:
    """The command that is killed and started again, over `prompts`, one row a line."""

    prompts: Path
    out: Path
    url: str
    tokens: int

    def start(self) -> subprocess.Popen[str]:
        """Begin, or go on."""
        options = {
            "prompts": self.prompts,
            "out": self.out,
            "server": self.url,
            "max_new_tokens": self.tokens,
            "concurrency": 16,
            "patience": 2,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return subprocess.Popen(
            [sys.executable, "data_prep/regenerate.py", *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def recorded(self) -> list[dict[str, Any]]:
        """Answers in the work file."""
        work = self.out.with_name(f"{self.out.name}.work")
        lines = work.read_bytes().split(b"\n")[1:-1] if work.exists() else []
        return [json.loads(line) for line in lines]

    def until(self, answers: int) -> subprocess.Popen[str]:
        """The process, still running, when so many answers are recorded. Raises RuntimeError if it ends before."""
        process = self.start()
        while len(self.recorded()) < answers:
            if process.poll() is not None:
                raise RuntimeError(f"it ended after {len(self.recorded())} answers: {process.communicate()[0][-2000:]}")
            time.sleep(0.05)
        return process


def make_prompts(count: int, path: Path) -> list[Conversation]:
    """The bundled samples' user turns, those with two turns first, written as prompts."""
    samples = sorted(read_conversations(SAMPLES), key=lambda each: (-len(each.messages), each.id))[:count]
    rows = [
        {"id": each.id, "messages": [message for message in each.messages if message["role"] != "assistant"]}
        for each in samples
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return samples


def answer(
    samples: Sequence[Conversation], run: Run, server: EngineServer, say: Callable[[str], None]
) -> dict[str, Any]:
    """Answer all prompts in spite of the two kills; what came of it, `rows` being those of the result."""
    started = time.monotonic()
    with server:
        figures: dict[str, Any] = {"seconds_to_start": time.monotonic() - started}
        say(f"the server answers after {figures['seconds_to_start']:.0f} s")
        client = run.until(len(samples) // 3)
        client.send_signal(signal.SIGKILL)
        client.communicate()
        first = run.recorded()
        say(f"client killed after {len(first)} answers")
        client = run.until(2 * len(samples) // 3)
        server.kill()
        said, _ = client.communicate(timeout=120)
        second = run.recorded()
        say(f"server killed after {len(second)} answers; the client: {said.splitlines()[-1]}")
        figures |= {"client_killed_at": len(first), "server_killed_at": len(second)}
        figures |= {"exit_code_without_server": client.returncode, "written_without_server": run.out.exists()}
        if client.returncode != 2:
            raise RuntimeError(f"the client was through before the server was killed: {said[-2000:]}")
        started = time.monotonic()
        server.start()
        figures["seconds_to_start_again"] = time.monotonic() - started
        client = run.start()
        said, _ = client.communicate()
        say(said.strip())
    if client.returncode:
        raise RuntimeError(said)
    rows = [json.loads(line) for line in run.out.read_text(encoding="utf-8").splitlines()]
    return figures | {"rows": rows} | faithful(samples, rows, first, second)


def faithful(
    samples: Sequence[Conversation], rows: Sequence[Any], first: Sequence[Any], second: Sequence[Any]
) -> dict[str, Any]:
    """Whether nothing was lost, doubled or moved to another prompt."""
    by_id = {row["id"]: row for row in rows}
    asked = [[message["content"] for message in each.messages if message["role"] == "user"] for each in samples]
    got = [[message["content"] for message in row["messages"] if message["role"] == "user"] for row in rows]
    kept = [entry for entry in second if "left_out" not in entry]
    in_place = [
        entry
        for entry in kept
        if by_id.get(entry["id"], {}).get("token_ids", [])[entry["turn"] - 1 :][:1] == [entry["ids"]]
    ]
    left_out = {entry["id"] for entry in second if "left_out" in entry}
    order = [each.id for each in samples]
    return {
        "prompts": len(samples),
        "conversations": len(rows),
        "ids_in_order_once": [row["id"] for row in rows] == [identity for identity in order if identity in by_id],
        "on_their_prompts": all(
            theirs == ours[: len(theirs)]
            for theirs, ours in zip(got, [a for a, i in zip(asked, order, strict=True) if i in by_id], strict=True)
        ),
        "first_kept": list(first) == list(second[: len(first)]),
        "recorded_before_the_last_start": len(kept),
        "of_them_unchanged": len(in_place),
        "left_out_before_the_last_start": len(left_out),
    }


@torch.inference_mode()
def compare(target: Target, rows: Sequence[Any]) -> dict[str, Any]:
    """The server's tokens against our teacher-forced argmax, with the bound that rounding gives."""
    sequences = []
    for row in rows:
        conversation = Conversation(row["id"], row["messages"], row["finish_reason"])
        sequences += render_all(target.tokenizer, conversation, target.eos_ids)
    noise = rounding(target, [sequence.ids for sequence in sequences[:FLOAT64]])
    tokens = same = within = 0
    listed = []
    for sequence in sequences:
        logits_TV = target.logits(target.states(torch.tensor([sequence.ids])).last[0]).float()
        for t, turn in enumerate(sequence.turn):
            if not turn:
                continue
            best, token = int(logits_TV[t - 1].argmax()), sequence.ids[t]
            gap = float(logits_TV[t - 1, best] - logits_TV[t - 1, token])
            tokens, same, within = tokens + 1, same + (best == token), within + (0 < gap <= 4 * noise)
            if best != token and len(listed) < LISTED:
                listed.append({"id": sequence.id, "position": t, "server": token, "ours": best, "gap": gap})
    return {
        "tokens": tokens,
        "our_argmax": same,
        "within_rounding": within,
        "share": (same + within) / tokens,
        "rounding": noise,
        "bound": 4 * noise,
        "not_our_argmax": listed,
    }


def rounding(target: Target, texts: Sequence[list[int]]) -> float:
    """The largest difference between a logit in fp32 and in float64 over `texts`."""
    exact = Target.load(str(target.path), "float64", str(target.device))
    worst = 0.0
    for ids in texts:
        ids_1T = torch.tensor([ids])
        ours, theirs = (each.logits(each.states(ids_1T).last).double() for each in (target, exact))
        worst = max(worst, float((ours - theirs).abs().max()))
    return worst


def measure(count: int = 200, tokens: int = 64, log: str = "") -> dict[str, Any]:
    """All figures; the server's log goes to the file `log`, or nowhere."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        samples = make_prompts(count, folder / "prompts.jsonl")
        server = vllm_server(
            embedded_folder(), Path(log) if log else folder / "server.log", "float32", "--enforce-eager"
        )
        stack.callback(server.stop)
        run = Run(folder / "prompts.jsonl", folder / "out.jsonl", f"{server.url}/v1", tokens)
        found = answer(samples, run, server, lambda text: print(text, flush=True))
    rows = found.pop("rows")
    figures = {"engine": PACKAGE, "dtype": "float32", "max_new_tokens": tokens}
    return figures | found | compare(Target.load(dtype="float32"), rows)


if __name__ == "__main__":
    from jsonargparse import auto_cli
    from results_file import write_result  # beside this file; the test imports only `measure`

    write_result("data-server", auto_cli(measure))
