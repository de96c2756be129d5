"""Answers by OpenAI-compatible servers of the target (vLLM, SGLang): many requests in flight, faults ridden out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import httpx

from data_prep.chat_completion import Law, Malformed, read_response, request_body
from data_prep.dialogue import TOO_LONG, Answer, Dialogue
from heads.errors import HeadwayError

TRIES = 6  # of one request that servers fail on, before it is left for the next run
FIRST_REST, LONGEST_REST = 0.5, 30.0  # seconds that a server is left alone after a fault; doubled with each more
FAULTS = {408, 409, 425, 429}  # and every 5xx: the request may do well later, or elsewhere
SHOWN = 200  # characters of a server's words in an error


class Fault(Exception):
    """A request that did not do well, and may if it is tried again. `blame`: the request itself may be at fault."""

    def __init__(self, what: str, *, blame: bool = True, rest: float = 0.0) -> None:
        super().__init__(what)
        self.blame, self.rest = blame, rest


@dataclass
class Server:
    """One server: where it is, what it serves the target as, and how it does."""

    url: str
    model: str = ""
    positions: int | None = None
    in_flight: int = 0
    faults: int = 0  # since the last answer
    faulty_since: float = 0.0
    rests_until: float = 0.0

    def did_well(self) -> None:
        """An answer came."""
        self.faults, self.rests_until = 0, 0.0

    def did_badly(self, now: float, fault: Fault) -> None:
        """Leave it alone for a while, longer each time; faults that come together count once."""
        if now < self.rests_until:
            return
        if not self.faults:
            self.faulty_since = now
        rest = max(fault.rest, FIRST_REST * 2**self.faults)
        self.faults += 1
        self.rests_until = now + min(LONGEST_REST, rest) * random.uniform(0.5, 1.0)


class ServerPool:
    """Servers of one target, behind one `ask`.

    Args:
        urls: base URLs, with or without the final /v1
        target: name of the target, and `folder` where it lies here
        model: the name the servers have it under; empty: the target's name, its folder or the folder's name
        concurrency: requests in flight at each server, at most
        timeout: seconds that one answer may take
        patience: seconds that every server may be at fault before the run is given up
    """

    def __init__(
        self,
        urls: Sequence[str],
        target: str,
        folder: str,
        model: str = "",
        concurrency: int = 64,
        timeout: float = 600.0,
        patience: float = 300.0,
    ) -> None:
        self.servers = [Server(_base(url)) for url in urls]
        self.names = [model] if model else [target, folder, PurePath(folder).name]
        self.concurrency, self.patience = concurrency, patience
        self._freed = asyncio.Event()
        key = os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.timeout = httpx.Timeout(timeout, connect=10.0)
        self.client: httpx.AsyncClient | None = None  # while requests are made

    def open(self) -> httpx.AsyncClient:
        """The connections, to be entered while requests are made."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx.AsyncClient(timeout=self.timeout, limits=limits, headers=self.headers)
        return self.client

    @property
    def positions(self) -> int | None:
        """Tokens that prompt and answer may have together, where servers say it."""
        return min((server.positions for server in self.servers if server.positions), default=None)

    def find_models(self) -> None:
        """Ask each server what it serves. Raises HeadwayError for one that does not answer, or serves another model."""
        for server in self.servers:
            try:
                answer = httpx.get(f"{server.url}/models", headers=self.headers, timeout=10.0)
                answer.raise_for_status()
                models = [dict(model) for model in answer.json()["data"]]
                served = [str(model["id"]) for model in models]
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise HeadwayError(
                    f"server {server.url}: does not say what it serves ({_words(error)}); start it, or mend --server"
                ) from error
            ours = [model for model in models if model["id"] in self.names or model.get("root") in self.names]
            if not ours:
                raise HeadwayError(
                    f"server {server.url}: serves {', '.join(map(repr, served)) or 'nothing'}, not '{self.names[0]}'; "
                    "start it on the target, or give --model if that is the target by another name"
                )
            server.model = ours[0]["id"]
            length = ours[0].get("max_model_len")
            server.positions = length if isinstance(length, int) else None

    async def ask(self, dialogue: Dialogue, body: dict[str, Any]) -> Answer:
        """The answer to a dialogue's prompt, from whichever server has least to do.

        Raises Fault when servers failed on this one TRIES times; HeadwayError when all servers are at fault for longer
        than `patience`, one refuses the request, or one made other ids of the prompt.
        """
        blamed = 0
        while True:
            server = await self._free_server()
            server.in_flight += 1
            try:
                response = await self._post(server, body)
                try:
                    answer = read_response(response, dialogue.prompt)
                except Malformed as error:
                    raise Fault(f"{server.url}: {error}") from error
                server.did_well()
                return answer
            except Fault as fault:
                now = time.monotonic()
                server.did_badly(now, fault)
                self._lose_patience(now, fault)
                blamed += fault.blame
                if blamed == TRIES:
                    raise
            finally:
                server.in_flight -= 1
                self._freed.set()

    async def _free_server(self) -> Server:
        while True:
            now = time.monotonic()
            awake = [server for server in self.servers if server.rests_until <= now]
            free = [server for server in awake if server.in_flight < self.concurrency]
            if free:
                return min(free, key=lambda server: server.in_flight)
            waking = [server.rests_until - now for server in self.servers if server not in awake]
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), min(waking, default=None))

    def _lose_patience(self, now: float, fault: Fault) -> None:
        if all(server.faults for server in self.servers):
            longest = now - max(server.faulty_since for server in self.servers)
            if longest > self.patience:
                names = ", ".join(server.url for server in self.servers)
                raise HeadwayError(
                    f"{names}: no answer for {longest:.0f} s ({fault}); see to the server and run the same command "
                    "again: it goes on behind the last answer"
                ) from fault

    async def _post(self, server: Server, body: dict[str, Any]) -> Any:
        """The parsed response. Raises Fault for what may pass, HeadwayError for a refusal."""
        assert self.client is not None
        try:
            response = await self.client.post(f"{server.url}/chat/completions", json=body | {"model": server.model})
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Fault(f"{server.url}: {_words(error)}", blame=False) from error
        except httpx.TransportError as error:
            raise Fault(f"{server.url}: {_words(error)}") from error
        if response.status_code in FAULTS or response.status_code >= 500:
            rest = response.headers.get("Retry-After", "")
            raise Fault(
                f"{server.url}: status {response.status_code}: {response.text[:SHOWN]}",
                blame=response.status_code != 429,
                rest=float(rest) if rest.isdigit() else 0.0,
            )
        if response.status_code != 200:
            raise HeadwayError(f"status {response.status_code}: {response.text[:SHOWN]}")
        try:
            return response.json()
        except ValueError as error:
            raise Fault(f"{server.url}: an answer that is no JSON") from error


async def answer_by_servers(
    dialogues: Sequence[Dialogue],
    take: Callable[[Dialogue, Answer], None],
    pool: ServerPool,
    most: int,
    law: Law,
    seed: Callable[[Dialogue], int],
) -> list[tuple[Dialogue, str]]:
    """Answer every turn of `dialogues`; `take` is given each answer and moves its dialogue on. Returns the dialogues that
    servers failed on TRIES times, each with the last fault.

    Raises HeadwayError, naming the row, as `ServerPool.ask` does.
    """
    waiting = iter(dialogues)
    failed: list[tuple[Dialogue, str]] = []

    async def work() -> None:
        for dialogue in waiting:
            while not dialogue.ended:
                room = most
                if pool.positions is not None:
                    room = min(most, pool.positions - len(dialogue.prompt))
                if room < 1:
                    dialogue.leave(TOO_LONG)
                    break
                try:
                    take(dialogue, await pool.ask(dialogue, request_body(dialogue, room, law, seed(dialogue))))
                except Fault as fault:
                    failed.append((dialogue, str(fault)))
                    break
                except HeadwayError as error:
                    raise HeadwayError(f"{dialogue.where}: conversation '{dialogue.id}': {error}") from error

    async with pool.open():
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(pool.concurrency * len(pool.servers), len(dialogues))):
                    group.create_task(work())
        except* HeadwayError as errors:
            raise errors.exceptions[0] from None
    return failed


def _base(url: str) -> str:
    """A base URL as the API has it, ending with /v1. Raises HeadwayError for what is none."""
    try:
        parsed = httpx.URL(url.strip().rstrip("/"))
    except httpx.InvalidURL as error:
        raise HeadwayError(f"--server {url}: {error}; give a URL such as http://localhost:8000/v1") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise HeadwayError(f"--server {url}: is no URL; give one such as http://localhost:8000/v1")
    return str(parsed) if parsed.path.endswith("/v1") else f"{str(parsed).rstrip('/')}/v1"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
