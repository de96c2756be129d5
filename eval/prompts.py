"""Prompts to measure on: conversations, or question files as benchmarks publish them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.conversations import SAMPLES, prompt_ids, read_conversations, split_heldout
from eval.masks import position_limit
from heads.errors import HeadwayError
from heads.target import Target

HELD_OUT = 64
KEYS = "messages, turns, question"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where a prompt came from (file and row), its messages, and its token ids with the generation prompt."""

    source: str
    messages: list[dict[str, Any]]
    ids: list[int]


def heldout_prompts(target: Target) -> list[Prompt]:
    """The bundled conversations that no demo head was trained on, each up to its last answer."""
    _, heldout = split_heldout(read_conversations(SAMPLES), HELD_OUT)
    return [_prompt(f"{SAMPLES.name}, {row.id}", row.messages, target) for row in heldout]


def read_prompts(path: Path, target: Target) -> list[Prompt]:
    """Prompts of a JSON lines file; a row holds `messages` (a conversation), `turns` (user turns) or `question`.

    Of a conversation the last user turn is the one to answer, of `turns` the first. Raises HeadwayError naming file
    and line for a row that cannot be read, and for a file without rows.
    """
    if not path.is_file():
        raise HeadwayError(f"{path}: no such file; give --prompts a JSON lines file with {KEYS}")
    prompts = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            source = f"{path}, line {number}"
            prompts.append(_prompt(source, _messages(source, line), target))
    if not prompts:
        raise HeadwayError(f"{path}: no rows; each line is a JSON object with {KEYS}")
    return prompts


def check_lengths(prompts: Sequence[Prompt], room: int, target: Target) -> None:
    """Raise HeadwayError naming the first prompt that leaves less than `room` of the target's positions."""
    limit = position_limit(target)
    for prompt in prompts:
        if len(prompt.ids) + room > limit:
            raise HeadwayError(
                f"{prompt.source}: {len(prompt.ids)} tokens, and {room} for answer and draft, pass the "
                f"{limit} positions of target '{target.name}'; shorten it or lower --max_new_tokens"
            )


def _messages(source: str, line: bytes) -> list[dict[str, Any]]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise HeadwayError(f"{source}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise HeadwayError(f"{source}: not JSON ({error.msg}, column {error.colno}); mend or remove the row") from error
    found = row if isinstance(row, dict) else {}
    messages, turns, question = found.get("messages"), found.get("turns"), found.get("question")
    if isinstance(messages, list) and all(map(_is_message, messages)):
        return messages
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    raise HeadwayError(f"{source}: no prompt in it; a row is an object with one of {KEYS}")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _prompt(source: str, messages: list[dict[str, Any]], target: Target) -> Prompt:
    asked = list(messages)
    while asked and asked[-1].get("role") != "user":
        asked.pop()
    if not asked:
        raise HeadwayError(f"{source}: no user turn to answer; add one or remove the row")
    try:
        return Prompt(source, asked, prompt_ids(target.tokenizer, asked))
    except HeadwayError as error:  # the chat template's own words, with the row they are about
        raise HeadwayError(f"{source}: {error}") from error
