"""What is sent to a server for an answer, and what is taken from its response (the OpenAI chat completions API).

A server says which ids it made of a prompt, or at least how many; they must be ours, for an answer to another prompt is
no answer. Where it says which ids it wrote (vLLM does, with `return_token_ids`), those are taken, not its text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from data_prep.dialogue import Answer, Dialogue, Message
from data_prep.message_text import REASONING
from heads.errors import HeadwayError

MOST_ID = 2**31  # no vocabulary comes near it; tokenizers take no larger numbers
FINISHED = {"stop": False, "tool_calls": False, "length": True}  # finish_reason -> whether the answer was cut


class Malformed(Exception):
    """A response that is no answer."""


@dataclass(frozen=True)
class Law:
    """How answers are chosen: greedily at temperature 0, else sampled from the target's law or its nucleus."""

    temperature: float = 0.0
    top_p: float = 1.0


def request_body(dialogue: Dialogue, most: int, law: Law, seed: int) -> dict[str, Any]:
    """The request for a dialogue's due answer of at most `most` tokens, all but the model's name.

    Every sampling option is sent: what is left out, a server takes from the target's generation config, and there may
    be penalties in it.
    """
    given: dict[str, Any] = {"tools": dialogue.tools, "tool_choice": "auto"} if dialogue.tools else {}
    if dialogue.options:
        given["chat_template_kwargs"] = dialogue.options
    return given | {
        "messages": [_sent(message) for message in dialogue.messages],
        "max_tokens": most,
        "n": 1,
        "temperature": law.temperature,
        "top_p": law.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "return_token_ids": True,
    }


def _sent(message: Message) -> Message:
    """A message as the API has it: arguments of calls as JSON texts, thoughts under each name that servers read."""
    sent = dict(message)
    if thoughts := [message[name] for name in REASONING if message.get(name)]:
        sent |= {"reasoning": thoughts[0], "reasoning_content": thoughts[0]}
    if message.get("tool_calls"):
        sent["tool_calls"] = [_sent_call(call, number) for number, call in enumerate(message["tool_calls"])]
    return sent


def _sent_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    named = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": named}


def read_response(response: Any, prompt: list[int]) -> Answer:
    """The answer in a parsed response. Raises Malformed where there is none, HeadwayError where the server made other ids
    of the prompt than `prompt`, or does not say."""
    try:
        choice = response["choices"][0]
        usage = response.get("usage") or {}
        finish, ids = _given(choice["finish_reason"], str), _ids(choice.get("token_ids"))
        count = len(ids) if ids is not None else _given(usage["completion_tokens"], int)
        theirs, their_count = _ids(response.get("prompt_token_ids")), _given(usage.get("prompt_tokens"), int)
        message = _read_message(choice["message"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"a response without an answer ({type(error).__name__}: {error})") from error
    if finish not in FINISHED or not count:
        raise Malformed(f"an answer of {count} tokens that ended with finish_reason {finish!r}")
    _compare(prompt, theirs, their_count)
    return Answer(ids, count, FINISHED[finish], message)


def _given(value: Any, kind: type) -> Any:
    """A value that is of its kind, or null. Raises TypeError for any other."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def _ids(value: Any) -> list[int] | None:
    """Token ids, or null. Raises TypeError and ValueError for what are none."""
    for each in _given(value, list) or []:
        if each is None or not 0 <= _given(each, int) < MOST_ID:
            raise ValueError(f"{each!r} among token ids")
    return value


def _compare(ours: list[int], theirs: list[int] | None, their_count: int | None) -> None:
    remedy = (
        "the server has another tokenizer or chat template, or adds a system turn; serve it from the target's folder"
    )
    if theirs is None:
        if their_count is None:
            raise HeadwayError("the server does not say how many tokens a prompt has, so that it cannot be compared")
        if their_count != len(ours):
            raise HeadwayError(f"the prompt has {their_count} tokens at the server and {len(ours)} here: {remedy}")
    elif theirs != ours:
        pairs = enumerate(zip(theirs, ours, strict=False))
        first = next((index for index, (their, our) in pairs if their != our), min(len(theirs), len(ours)))
        raise HeadwayError(
            f"the prompt's {len(theirs)} token ids at the server are not the {len(ours)} here, from token {first} on: "
            f"{remedy}"
        )


def _read_message(given: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": _given(given.get("content"), str)}
    if thoughts := _given(given.get("reasoning") or given.get("reasoning_content"), str):
        message["reasoning_content"] = thoughts
    if given.get("tool_calls"):
        message["tool_calls"] = [dict(call) for call in given["tool_calls"]]
    if message == {"role": "assistant", "content": None}:
        message["content"] = ""
    return message
