"""What a chat format is to the tests; tests/data_prep/chat_formats.py has them all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Options = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """One family. `swallows`: special tokens that take the white space behind them along, as Phi's do."""

    template: str
    specials: tuple[str, ...]
    stops: tuple[str, ...]
    prompt: Callable[[Messages, Tools, Options], str]
    written: Callable[[dict[str, Any], Options, bool], str]
    ends: Callable[[dict[str, Any]], str]
    system: bool = True
    tools: bool = False
    thinks: str = ""  # "field": reasoning_content; "content": inside the content, its opening in the prompt
    swallows: bool = False
    bos: str | None = None


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def content_of(message: dict[str, Any], *_: Any) -> str:
    return message.get("content") or ""


def chatml_turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"
