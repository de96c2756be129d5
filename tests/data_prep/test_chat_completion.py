"""Responses of servers: whatever type stands in whichever place, it is an answer, or said to be none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from data_prep.chat_completion import Malformed, read_response
from data_prep.dialogue import Dialogue
from data_prep.prompts import Prompt
from heads.errors import HeadwayError

PROMPT = [7, 8, 9]
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ODD: list[Any] = [None, True, -3, 2.5, "", "abc", [], [None], ["a"], [[3]], [-1], [2**40], {}, {"a": 1}]


def response(**more: Any) -> dict[str, Any]:
    """A good one, every field filled."""
    message = {"content": "the cat", "reasoning": "hm", "tool_calls": [CALL]} | more
    choice = {"finish_reason": "stop", "token_ids": [3, 4, 5], "message": message}
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    return copy.deepcopy({"choices": [choice], "usage": usage, "prompt_token_ids": PROMPT})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


def test_a_good_one() -> None:
    answer = read_response(response(), PROMPT)
    assert (answer.ids, answer.count, answer.cut) == ([3, 4, 5], 3, False)
    expected = {"role": "assistant", "content": "the cat", "reasoning_content": "hm", "tool_calls": [CALL]}
    assert answer.message == expected


@pytest.mark.parametrize(
    ("path", "odd"),
    [
        (("usage", "completion_tokens"), "3"),
        (("choices", 0, "finish_reason"), ["stop"]),
        (("choices", 0, "token_ids"), "abc"),
        (("choices", 0, "token_ids"), [3, None]),
        (("choices", 0, "token_ids"), [3, 2**40]),
        (("prompt_token_ids",), 3),
        (("choices", 0, "message", "content"), 5),
        (("choices", 0, "message", "reasoning"), ["hm"]),
        (("choices", 0, "message", "tool_calls"), "weather"),
        (("choices", 0, "message", "tool_calls", 0), None),
    ],
)
def test_another_type_is_no_answer(path: tuple[Any, ...], odd: Any) -> None:
    given = replaced(response(), path, odd)
    if path[0] == "usage":
        del given["choices"][0]["token_ids"]  # which would have been counted in its place
    with pytest.raises(Malformed, match=r"without an answer \(.*Error"):
        read_response(given, PROMPT)


def test_odd_values_everywhere(tiny_tokenizer: Any) -> None:
    """What is taken for an answer, a dialogue can go on with, to its next prompt and its row."""
    read = 0
    ids = tiny_tokenizer("the cat", add_special_tokens=False)["input_ids"]
    talk = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    for filled in (response(), response(tool_calls=None, reasoning=None)):
        filled["choices"][0]["token_ids"] = [*ids, tiny_tokenizer.eos_token_id]
        for path in places(filled):
            for odd in ODD:
                dialogue = Dialogue(Prompt("p", talk, [], "row"), tiny_tokenizer, [tiny_tokenizer.eos_token_id], {})
                given = replaced(filled, path, odd)
                if isinstance(given, dict) and given.get("prompt_token_ids") == PROMPT:
                    given["prompt_token_ids"] = dialogue.prompt
                try:
                    answer = read_response(given, dialogue.prompt)
                except (Malformed, HeadwayError):
                    continue
                read += 1
                if dialogue.take(answer) is not None:
                    assert dialogue.row({})["messages"][1]["role"] == "assistant"
    assert read > 100
