"""Runs of collection and regeneration on the tiny target, and servers that answer in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep import answer_server, collect, regenerate
from heads.target import Target
from tests.conftest import write_conversations
from tests.data_prep import collecting, regenerating
from tests.data_prep.fake_server import FakeServer


@pytest.fixture
def collection(tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path) -> collecting.Make:
    """Settings for a store in tmp_path/store out of the tiny conversations; keywords override."""

    def make(**changes: Any) -> collect.Settings:
        usual: dict[str, Any] = {
            "conversations": tiny_conversations,
            "out": tmp_path / "store",
            "target": str(tiny_target_dir),
            "taps": "1,3",
            "dtype": "float32",
            "store_dtype": "float32",
            "held_out": 4,
            "shard_tokens": 400,
        }
        return collect.Settings(**(usual | changes))

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of several threads may be grouped differently; bytes are compared between processes of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def serve(tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Iterator[regenerating.Serve]:
    """Starts fake servers, which are left alone for moments only when they are at fault, and stops them at the end."""
    monkeypatch.setattr(answer_server, "FIRST_REST", 0.01)
    monkeypatch.setattr(answer_server, "LONGEST_REST", 0.1)
    servers: list[FakeServer] = []

    def start(**manners: Any) -> FakeServer:
        servers.append(FakeServer(tiny_tokenizer, regenerating.MODEL, **manners))
        return servers[-1]

    yield start
    for server in servers:
        if not server.closing:
            server.close()


@pytest.fixture
def regeneration(tmp_path: Path, tiny_target_dir: Path) -> regenerating.Make:
    """Settings over 24 prompts; keywords override."""

    def make(**changes: Any) -> regenerate.Settings:
        prompts = tmp_path / "prompts.jsonl"
        if not prompts.exists():
            write_conversations(prompts, regenerating.make_prompts(24))
        usual: dict[str, Any] = {
            "prompts": prompts,
            "out": tmp_path / "out.jsonl",
            "target": str(tiny_target_dir),
            "model": regenerating.MODEL,
            "max_new_tokens": 64,
            "dtype": "float32",
            "device": "cpu",
            "concurrency": 8,
            "timeout": 20.0,
            "patience": 20.0,
        }
        return regenerate.Settings(**(usual | changes))

    return make


@pytest.fixture
def talks(tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The tiny target, loaded once, says nothing but words that begin with a blank, and stops."""
    target = Target.load(str(tiny_target_dir), "float32", "cpu")
    monkeypatch.setattr(Target, "load", lambda *_: target)
    words = [index for token, index in tiny_tokenizer.get_vocab().items() if token[0] == "Ġ" and len(token) > 1]
    bias_V = torch.full((len(tiny_tokenizer),), -1e4)
    bias_V[words] = 0.0
    bias_V[tiny_tokenizer.eos_token_id] = 0.5
    logits = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, last: logits(self, last) + bias_V)
    return target
