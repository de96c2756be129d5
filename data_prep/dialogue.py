"""A conversation that the target is answering, turn by turn, and the rule by which an answer is kept.

An answer is kept where its text, in the message that the conversation file holds, is tokenised to the very ids that the
target wrote: training would otherwise learn tokens that it never chose.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.conversations import parse_conversation
from data_prep.message_text import REASONING
from data_prep.prompts import Prompt
from data_prep.render import prompt_ids, render_all
from heads.errors import HeadwayError

Message = dict[str, Any]
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
THOUGHT = re.compile(r"\A(?:<think>)?(.*?)</think>(.*)\Z", re.DOTALL)

INEXACT = "the text is not tokenised to what the target wrote"
BLANK = "the answer is blank"
TOO_LONG = "the prompt leaves no room for an answer"
NO_CALL = "tool turns follow, but the answer did not call those tools"
CALL = "the answer called tools whose results are not there"
UNRENDERED = "the chat template does not take it"


@dataclass(frozen=True)
class Answer:
    """What came back for one turn. `ids` (None where a server does not say) end with the stop token unless the answer
    was cut; `count` is their number; `message` is a server's own reading of them, with thoughts and tool calls."""

    ids: list[int] | None
    count: int
    cut: bool
    message: Message | None = None


class Dialogue:
    """The target's conversation over one prompt.

    Attributes: id, messages so far (the target's own answers in place of those that came along), token_ids of each
    answer, finish_reason, ended (nothing more to answer), left_out (why it ended before its last turn, or None).
    """

    def __init__(self, prompt: Prompt, tokenizer: Any, stop_ids: Sequence[int], options: dict[str, Any]) -> None:
        self.id, self.where, self.tools = prompt.id, prompt.source, prompt.tools or None
        self.options, self.tokenizer, self.stop_ids = options, tokenizer, stop_ids
        self.messages: list[Message] = []
        self.token_ids: list[list[int]] = []
        self.finish_reason = "stop"
        self.left_out: str | None = None
        self._runs = list(_runs(prompt.messages))
        self.answers = len(self._runs)  # at most
        self.ended = False
        self.prompt: list[int] = []
        self._ask()

    @property
    def turn(self) -> int:
        """The number of the answer that is due, from 1."""
        return len(self.token_ids) + 1

    @property
    def prompt_hash(self) -> str:
        """What the due answer answers."""
        return hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:16]

    def take(self, answer: Answer) -> tuple[Message, list[int]] | None:
        """Go on with an answer to the prompt: the message that stands for it and its ids, or None, and then the
        conversation ends before that turn, `left_out` saying why."""
        for message in self._forms(answer):
            if (ids := self._exact(message, answer)) is not None:
                if not _said(message):
                    self.leave(BLANK)
                    return None
                self.add(message, ids, cut=answer.cut)
                return message, ids
        self.leave(INEXACT)
        return None

    def add(self, message: Message, ids: list[int], *, cut: bool) -> None:
        """Put an answer that is known to be exact in its place and see what the target is asked next."""
        self.messages.append(message)
        self.token_ids.append(ids)
        if cut:  # what follows would answer a turn that has no end
            self.finish_reason, self.ended = "length", True
        else:
            self._ask()

    def leave(self, reason: str) -> None:
        """End the conversation before the due answer."""
        self.left_out, self.ended = reason, True

    def row(self, made_by: dict[str, Any]) -> dict[str, Any]:
        """The line of the conversation file."""
        given: dict[str, Any] = {"tools": self.tools} if self.tools else {}
        if self.options:
            given["template_options"] = self.options
        written = {"finish_reason": self.finish_reason, "token_ids": self.token_ids, "made_by": made_by}
        return {"id": self.id, "messages": self._answered()} | given | written

    def _answered(self) -> list[Message]:
        last = max(index for index, message in enumerate(self.messages) if message["role"] == "assistant")
        return self.messages[: last + 1]

    def _ask(self) -> None:
        """Add what the target is told next."""
        if not self._runs:
            self.ended = True
            return
        run, names = self._runs[0]
        calls = self.messages[-1].get("tool_calls", []) if self.messages else []
        results = [message for message in run if message["role"] == "tool"]
        if results and [_name(call) for call in calls] != names:
            return self.leave(NO_CALL)
        if calls and not results:
            return self.leave(CALL)
        self.messages += _with_call_ids(run, calls)
        self._runs.pop(0)
        try:
            self.prompt = prompt_ids(self.tokenizer, self.messages, self.tools, self.options)
        except HeadwayError:
            self.leave(UNRENDERED)

    def _forms(self, answer: Answer) -> Iterator[Message]:
        """Messages that may stand for an answer: with its thoughts and calls apart, else as it was written."""
        if answer.message is not None and (answer.ids is None or set(answer.message) - {"role", "content"}):
            yield answer.message
        if answer.ids is not None:
            ended = answer.ids[-1] in self.stop_ids
            text = self.tokenizer.decode(answer.ids[:-1] if ended else answer.ids)
            apart = read_answer(text, with_calls=self.tools is not None and not answer.cut)
            if set(apart) - {"role", "content"}:
                yield apart
            yield {"role": "assistant", "content": text}

    def _exact(self, message: Message, answer: Answer) -> list[int] | None:
        """The ids of a message if they are the answer's, behind the prompt's, and the ones that training would learn."""
        row = {
            "id": self.id,
            "messages": [*self.messages, message],
            "finish_reason": "length" if answer.cut else "stop",
            "tools": self.tools,
            "template_options": self.options,
        }
        try:
            conversation = parse_conversation(row, self.where)
            sequence = render_all(self.tokenizer, conversation, self.stop_ids)[-1]
        except HeadwayError:  # such a message cannot stand in the file; another form of it may
            return None
        message.clear()
        message.update(conversation.messages[-1])
        first, due = len(self.prompt), self.turn
        ids = sequence.ids[first:]
        learnt = [turn == due for turn in sequence.turn]
        if sequence.ids[:first] != self.prompt or not all(learnt[first:]) or any(learnt[:first]):
            return None
        if answer.ids is not None:
            return ids if ids == answer.ids else None
        stop = not answer.cut  # servers differ in whether they count it
        return ids if len(ids) - answer.count in (0, int(stop)) else None


def read_answer(text: str, *, with_calls: bool) -> Message:
    """An answer's text as a message: thoughts up to `</think>` and, if wanted, `<tool_call>` blocks are set apart."""
    message: Message = {"role": "assistant", "content": text}
    if found := THOUGHT.match(text):
        message |= {"reasoning_content": found[1].strip("\n"), "content": found[2].lstrip("\n")}
    calls = [_parsed(found) for found in TOOL_CALL.findall(message["content"])] if with_calls else []
    if calls and all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        message["content"] = TOOL_CALL.sub("", message["content"]).strip("\n")
    return message


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _runs(messages: Sequence[Message]) -> Iterator[tuple[list[Message], list[str]]]:
    """What the target is told before each of its answers: up to a user turn, or all results of one round of tools.
    Beside it the names of the tools that the answer before it called in the prompts."""
    run: list[Message] = []
    names: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            names = [_name(call) for call in message.get("tool_calls", [])]
            continue
        run.append(message)
        after = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if message["role"] == "user" or (message["role"] == "tool" and after != "tool"):
            yield run, names
            run, names = [], []


def _name(call: dict[str, Any]) -> str:
    return call.get("function", call)["name"]


def _with_call_ids(run: Sequence[Message], calls: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Tool turns under the ids that the target's own calls have, in order, where there is one result a call."""
    results = sum(message["role"] == "tool" for message in run)
    ids = iter(call.get("id") for call in calls) if results == len(calls) else iter(())
    for message in run:
        identity = next(ids, None) if message["role"] == "tool" else None
        yield message | {"tool_call_id": identity} if identity else message


def _said(message: Message) -> bool:
    texts = [message.get("content"), *(message.get(name) for name in REASONING)]
    return bool(message.get("tool_calls")) or any(text and text.strip() for text in texts)
