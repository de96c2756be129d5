"""What the tests of regeneration share: prompts, and what the scripted target of a fake server makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.regenerate import Settings
from data_prep.render import prompt_ids
from tests.conftest import TEXT
from tests.data_prep.fake_server import FakeServer, script

Make = Callable[..., Settings]
Serve = Callable[..., FakeServer]
MODEL = "the-target"
ROOT = Path(__file__).parents[2]


def make_prompts(count: int, turns: int = 3) -> list[dict[str, Any]]:
    """Rows of 1 to `turns` user turns, some with a system turn, some with other people's answers."""
    source = random.Random(5)
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "be kind"}] if number % 3 == 0 else []
        for turn in range(1 + number % turns):
            words = " ".join(source.choices(TEXT.split(), k=source.randint(1, 6)))
            messages.append({"role": "user", "content": f"{number} {words} {turn}"})
            if number % 2:
                messages.append({"role": "assistant", "content": "somebody else's words"})
        rows.append({"id": f"p{number:03d}", "messages": messages, "finish_reason": "unanswered"})
    return rows


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def work_of(settings: Settings) -> Path:
    return settings.out.with_name(f"{settings.out.name}.work")


def expected(tokenizer: Any, prompts: list[dict[str, Any]], most: int = 64) -> list[list[dict[str, str]]]:
    """What the scripted target makes of prompts, written out turn by turn."""
    conversations = []
    for row in prompts:
        messages: list[dict[str, str]] = []
        for message in row["messages"]:
            if message["role"] == "assistant":
                continue
            messages.append(message)
            if message["role"] == "user":
                said = script(prompt_ids(tokenizer, messages))
                ids = tokenizer(said, add_special_tokens=False)["input_ids"]
                if len(ids) + 1 > most:
                    messages.append({"role": "assistant", "content": tokenizer.decode(ids[:most])})
                    break
                messages.append({"role": "assistant", "content": said})
        conversations.append(messages)
    return conversations


def as_expected(settings: Settings, tokenizer: Any, rows: list[dict[str, Any]]) -> bool:
    found = rows_of(settings.out)
    return [row["id"] for row in found] == [row["id"] for row in rows] and [
        row["messages"] for row in found
    ] == expected(tokenizer, rows, settings.max_new_tokens)
