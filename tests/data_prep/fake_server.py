"""An OpenAI-compatible server in this process that answers by a script and misbehaves as it is told."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.conftest import TEXT

WORDS = TEXT.replace(",", "").replace(".", "").split()
Spoil = Callable[[dict[str, Any], int], str]
"""From a request and its number (from 1), what happens: "fine", or a name that `_Handler.misbehave` knows."""


def script(prompt: list[int]) -> str:
    """What the fake target says to a prompt: a few words that follow from its ids."""
    source = random.Random(hashlib.sha256(json.dumps(prompt).encode()).hexdigest())
    return " ".join(source.choices(WORDS, k=source.randint(1, 8)))


class FakeServer:
    """A server on a free port, or on `port`.

    Attributes: url, bodies (requests, in their order), answered (how often each list of messages got a good answer), most_at_once.
    """

    def __init__(self, tokenizer: Any, model: str, port: int = 0, **manners: Any) -> None:
        self.tokenizer, self.model = tokenizer, model
        self.spoil: Spoil = manners.pop("spoil", lambda body, number: "fine")
        self.answer: Callable[[dict[str, Any], list[int]], dict[str, Any]] = manners.pop("answer", self.say)
        self.delay: float = manners.pop("delay", 0.0)
        self.with_ids: bool = manners.pop("with_ids", True)
        assert not manners
        self.bodies: list[dict[str, Any]] = []
        self.answered: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.lock, self.closing = threading.Lock(), False
        self.http = _Http(("127.0.0.1", port), _Handler)
        self.http.fake = self
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """Ids that a right server makes of a request."""
        messages = [dict(message) for message in body["messages"]]
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **body.get("chat_template_kwargs", {}),
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def say(self, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        """The scripted answer, cut at `max_tokens`: message, ids and finish_reason."""
        ids = [*self.tokenizer(script(prompt), add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        cut = len(ids) > body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        content = self.tokenizer.decode(ids if cut else ids[:-1])
        return {"message": {"content": content}, "token_ids": ids, "finish_reason": "length" if cut else "stop"}

    def respond(self, body: dict[str, Any]) -> dict[str, Any]:
        """A good response to a request."""
        prompt = self.prompt(body)
        said = self.answer(body, prompt)
        ids = said["token_ids"]
        if not self.with_ids:
            said = {name: value for name, value in said.items() if name != "token_ids"}
        return {
            "model": body["model"],
            "choices": [{"index": 0} | said],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        } | ({"prompt_token_ids": prompt} if self.with_ids else {})

    def close(self) -> None:
        """Stop at once; requests in flight lose their connections."""
        self.closing = True
        self.http.shutdown()
        self.http.drop_all()
        self.http.server_close()
        self.thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads, block_on_close, allow_reuse_address, request_queue_size = True, False, True, 256
    fake: FakeServer

    def __init__(self, *args: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def drop_all(self) -> None:
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """A client that was killed, or a connection that was dropped on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": self.server.fake.model, "max_model_len": 512}]})

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.bodies.append(body)
            number = len(fake.bodies)
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
        try:
            time.sleep(fake.delay)
            manner = fake.spoil(body, number)
            if manner != "fine":
                self.misbehave(manner, body)
            elif not fake.closing:
                response = fake.respond(body)
                with fake.lock:
                    fake.answered[json.dumps(body["messages"])] += 1
                self.send(200, response)
        finally:
            with fake.lock:
                fake.at_once -= 1

    def misbehave(self, manner: str, body: dict[str, Any]) -> None:
        """One of the ways in which servers fail."""
        if manner.isdigit():
            self.send(int(manner), {"error": {"message": "something is wrong"}})
        elif manner == "no JSON":
            self.send_bytes(200, b"<html>gateway</html>")
        elif manner == "no choices":
            self.send(200, {"choices": []})
        elif manner == "abort":
            response = self.server.fake.respond(body)
            response["choices"][0]["finish_reason"] = "abort"
            self.send(200, response)
        elif manner == "half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif manner == "slow":
            time.sleep(1.5)
            self.send(200, self.server.fake.respond(body))
        else:
            assert manner == "drop"
            self.close_connection = True

    def send(self, status: int, content: Any) -> None:
        self.send_bytes(status, json.dumps(content).encode())

    def send_bytes(self, status: int, content: bytes) -> None:
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
