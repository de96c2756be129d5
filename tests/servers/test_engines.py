"""What is read of an engine: its options from what is written beside an export, its counters; a stand-in answers for SGLang."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.engines import Answer, Counted, Sglang, Vllm, counted_by_vllm, speculation_options

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 50.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.5e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 120.0
"""


def test_acceptance_length_is_accepted_over_rounds_and_one():
    assert counted_by_vllm(METRICS) == Counted(250, 150)
    assert counted_by_vllm(METRICS).acceptance_length == pytest.approx(1.6)


def test_a_server_that_does_not_speculate_is_an_error():
    with pytest.raises(RuntimeError, match="is it speculating"):
        counted_by_vllm(METRICS.replace("200.0", "0.0").replace("50.0", "0.0"))
    with pytest.raises(RuntimeError, match="is it speculating"):
        Sglang().counted("http://x", [Answer([1, 2, 3])])


def test_options_are_those_of_the_written_command():
    settings = '{"method": "eagle3", "model": "a b", "num_speculative_tokens": 4}'
    line = f"vllm serve some/model --dtype float32 --speculative-config '{settings}'"
    assert speculation_options(line) == ["--dtype", "float32", "--speculative-config", settings]
    line = "python -m sglang.launch_server --model-path some/model --dtype float32 --speculative-algorithm EAGLE3"
    assert speculation_options(line) == ["--dtype", "float32", "--speculative-algorithm", "EAGLE3"]


def test_programs():
    module = "vllm.entrypoints.openai.api_server"
    assert Vllm().program("py", ["--model", "m"]) == ["py", "-m", module, "--model", "m"]
    assert Sglang().program("py", ["--model-path", "m"]) == ["py", "-m", "sglang.launch_server", "--model-path", "m"]


class _Handler(BaseHTTPRequestHandler):
    """Answers as the two engines do; what it was sent is kept."""

    seen: list[tuple[str, dict[str, object]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body))
        vllm = {"choices": [{"token_ids": [7, 8, 9]}]}
        content = json.dumps({"output_ids": [7, 8, 9, 10, 11], "meta_info": {"spec_verify_ct": 2}} if self.path == "/generate" else vllm).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing into the test's output."""


@pytest.fixture
def stand_in() -> Iterator[tuple[str, list[tuple[str, dict[str, object]]]]]:
    seen: list[tuple[str, dict[str, object]]] = []
    handler = type("Handler", (_Handler,), {"seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def test_answers_are_ids_and_greedy(stand_in: tuple[str, list[tuple[str, dict[str, object]]]]):
    url, seen = stand_in
    assert Vllm().ask(url, "m", [1, 2], 3) == Answer([7, 8, 9])
    found = Sglang().ask(url, "m", [1, 2], 5)
    assert found == Answer([7, 8, 9, 10, 11], 2)
    # 4 tokens after the prefill's in 2 rounds: each gave its own token, so 2 drafts were accepted
    assert Sglang().counted(url, [found]) == Counted(2, 2)
    (first, completion), (second, generate) = seen
    assert (first, completion["prompt"], completion["temperature"]) == ("/v1/completions", [1, 2], 0.0)
    assert completion["max_tokens"] == 3
    assert second == "/generate"
    assert generate == {"input_ids": [1, 2], "sampling_params": {"temperature": 0.0, "max_new_tokens": 5}}
