"""Conversations through a chat template: the sequences that the target saw, and which of their tokens it wrote.

The target wrote an answer behind the messages before it and the generation prompt. Where the template renders that
text and the answer to the beginning of the whole conversation, one sequence holds all answers. Where it rewrites
earlier turns (drops their thinking, moves the system turn), a later answer was written behind another text than the
one that holds the earlier ones, so it becomes a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from data_prep.message_text import parts_of, put_back, shared_end, shared_start, with_mark
from heads.errors import HeadwayError

if TYPE_CHECKING:
    from data_prep.conversations import Conversation

Message = dict[str, Any]
MARKS = "".join(map(chr, range(0xE000, 0xE100)))  # private use: no template means anything by them
# What a template can raise on messages that it was not written for.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Rendered:
    """A sequence as the target saw it, up to the end of its last answer.

    Attributes:
        ids: token ids
        turn: 0 where token t is not supervised, k where it belongs to the conversation's k-th assistant turn (from 1),
            the turn's terminator included
        id: the conversation's; its second sequence has `ID#2`, and so on
        text: what `ids` stand for
        extents: (first, last + 1) characters of each token in `text`; tokens of one character share it
    """

    ids: list[int]
    turn: list[int]
    id: str
    text: str
    extents: list[tuple[int, int]]


@dataclass(frozen=True)
class _Answer:
    """Assistant turn `number`: `text` is what the target saw and then wrote, `prompt` the part that it saw."""

    number: int
    prompt: str
    text: str


def render(
    tokenizer: Any, conversation: Conversation, stop_ids: Sequence[int], max_length: int | None = None
) -> Rendered:
    """A conversation that one sequence holds. Raises HeadwayError as `render_all` does, and where it takes several."""
    sequences = render_all(tokenizer, conversation, stop_ids, max_length)
    if len(sequences) > 1:
        raise HeadwayError(
            f"conversation '{conversation.id}': the chat template strips or rewrites earlier turns, so it takes "
            f"{len(sequences)} sequences; cut it after the first answer"
        )
    return sequences[0]


def render_all(
    tokenizer: Any, conversation: Conversation, stop_ids: Sequence[int], max_length: int | None = None
) -> list[Rendered]:
    """A conversation as the fewest sequences in which each answer stands behind exactly what the target saw, each cut
    to `max_length` tokens. Every answer is supervised in one of them.

    Supervised is what the target wrote: the tokens that lie wholly between the end of the generation prompt and the end
    of the turn's terminator, the first stop token behind the message's own text. What the generation prompt supplies
    (an empty think block) is not; where the conversation does not say whether thinking was on, an answer without any
    counts as one with thinking off. White space that the template trims off an answer is put back. The bounds come from
    rendering prefixes and altered messages, never from searching the text.

    Raises HeadwayError, naming conversation and message, when the template does not continue its generation prompt in
    a way that tells what was written, leaves out a part of an answer, or ends it with none of `stop_ids`.
    """
    chat = _Chat(tokenizer, conversation)
    runs: list[list[_Answer]] = []
    for answer in chat.answers(set(stop_ids)):
        if runs and answer.prompt.startswith(runs[-1][-1].text):
            runs[-1].append(answer)
        else:
            runs.append([answer])
    return [
        _sequence(tokenizer, run, conversation.id + (f"#{number}" if number > 1 else ""), max_length)
        for number, run in enumerate(runs, 1)
    ]


def _sequence(tokenizer: Any, run: Sequence[_Answer], identity: str, max_length: int | None) -> Rendered:
    text = run[-1].text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    extents = _extents(tokenizer, encoded["input_ids"], encoded["offset_mapping"])[:max_length]
    ids = encoded["input_ids"][:max_length]
    turn, spans = [0] * len(ids), iter(run)
    answer = next(spans)
    for t, (start, end) in enumerate(extents):
        while start >= len(answer.text) and answer is not run[-1]:
            answer = next(spans)
        if len(answer.prompt) <= start and end <= len(answer.text):
            turn[t] = answer.number
    return Rendered(ids, turn, identity, text, extents)


def _extents(tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Characters of each token. Byte-level tokenizers may leave the blank that a token starts with out of its offset;
    it is the token's all the same, and the one before an answer can be the template's. Some special tokens swallow the
    white space behind them, which is not the next one's then."""
    extents, before, swallowing = [], 0, _swallowing(tokenizer)
    for t, (start, end) in enumerate(offsets):
        swallowed = t > 0 and ids[t - 1] in swallowing
        extents.append((start if swallowed else min(start, before), end))
        before = end
    return extents


@lru_cache(maxsize=8)
def _swallowing(tokenizer: Any) -> frozenset[int]:
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.rstrip)


def prompt_ids(
    tokenizer: Any,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    template_options: dict[str, Any] | None = None,
) -> list[int]:
    """Ids of `messages` with the generation prompt: what the target answers. Raises HeadwayError as `render_all` does
    for a template that refuses them."""
    text = apply_template(tokenizer, messages, tools, template_options or {}, "prompt", add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def apply_template(
    tokenizer: Any,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    where: str,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Text of `messages` by the tokenizer's chat template; `options` are variables of the template, such as
    enable_thinking. Raises HeadwayError, beginning with `where`, when there is no template, or it refuses them."""
    if not tokenizer.chat_template:
        raise HeadwayError(f"{where}: the target's tokenizer has no chat template; use a chat model")
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except TEMPLATE_ERRORS as error:
        raise HeadwayError(
            f"{where}: the chat template refuses {len(messages)} of its messages ({error}); remove the conversation"
        ) from error


class _Chat:
    """One conversation and its template."""

    def __init__(self, tokenizer: Any, conversation: Conversation) -> None:
        self.tokenizer, self.conversation = tokenizer, conversation
        self.where = f"conversation '{conversation.id}'"
        self.hybrid = "enable_thinking" in str(tokenizer.chat_template)
        if not tokenizer.is_fast:
            raise HeadwayError(f"{self.where}: {type(tokenizer).__name__} gives no token offsets; use a fast tokenizer")

    def text(self, messages: list[Message], *, prompt: bool = False, **options: Any) -> str:
        """`messages` rendered, with the generation prompt or without."""
        given = self.conversation
        options = given.template_options | options
        return apply_template(self.tokenizer, messages, given.tools, options, self.where, add_generation_prompt=prompt)

    def answers(self, stops: set[int]) -> Iterator[_Answer]:
        """The assistant turns, each behind what the target saw when it wrote it."""
        messages = self.conversation.messages
        written = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for number, index in enumerate(written, 1):
            cut = self.conversation.finish_reason == "length" and index == len(messages) - 1
            prompt, own, tail = self._split(index, cut)
            end = 0 if cut else self._terminator(tail, stops, number)
            yield _Answer(number, prompt, prompt + own + tail[:end])

    def _terminator(self, tail: str, stops: set[int], number: int) -> int:
        """Where the first stop token ends in what the template puts behind a message."""
        encoded = self.tokenizer(tail, add_special_tokens=False, return_offsets_mapping=True)
        for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token in stops:
                return end
        raise HeadwayError(
            f"{self.where}, assistant turn {number}: the chat template ends it with none of the target's stop tokens "
            f"{sorted(stops)}; name the one it uses in generation_config.json"
        )

    def _split(self, index: int, cut: bool) -> tuple[str, str, str]:
        """What the target saw before assistant message `index`, what it wrote, and what the template puts behind."""
        message = self.conversation.messages[index]
        content, alone = message.get("content") or "", parts_of(message) == ["content"]
        whole, prompts = self.text(self.conversation.messages[: index + 1]), self._prompts(index)
        for prompt in prompts:
            # Most answers, and all there is to find out; a cut one could be taken for what the template puts before it.
            if alone and content and not cut and whole.startswith(prompt + content):
                return prompt, content, whole[len(prompt + content) :]
        size = len(whole) - self._behind(index, whole)
        body, tail = whole[:size], whole[size:]
        for prompt in prompts:
            own = body[len(prompt) :] if body.startswith(prompt) else None
            if own is not None and (not alone or put_back(own, content) is not None):
                break
        if own is None:
            own = self._behind_previous(index, whole, body, prompt)
        if own is not None and not alone:
            return prompt, own, tail
        if own is not None and (untrimmed := put_back(own, content)) is not None:
            return prompt, untrimmed, tail
        if alone and (own is not None or cut or self._drops(index, whole, prompt)):
            return prompt, content, tail
        raise HeadwayError(
            f"{self.where}, message {index + 1}: the chat template starts this answer otherwise than its generation "
            "prompt, so what the target wrote cannot be told; give the content as the target wrote it, thinking "
            "included, remove the conversation, or use another template"
        )

    def _prompts(self, index: int) -> list[str]:
        """The text that the target may have seen; the one with thinking off first, where nothing is said about it."""
        before = self.conversation.messages[:index]
        prompts = [self.text(before, prompt=True)]
        unsaid = self.hybrid and "enable_thinking" not in self.conversation.template_options
        if unsaid and "reasoning" not in parts_of(self.conversation.messages[index]):
            prompts.insert(0, self.text(before, prompt=True, enable_thinking=False))
        return prompts

    def _behind(self, index: int, whole: str) -> int:
        """Characters of `whole` behind the text of its last message: what all renderings with an altered end share.

        Raises HeadwayError for a part of the message (its thinking, say) that the template leaves out.
        """
        shortest = len(whole)
        for part in parts_of(self.conversation.messages[index]):
            altered = self._with_altered(index, part, whole, index)
            if altered == whole:
                raise HeadwayError(
                    f"{self.where}, message {index + 1}: the chat template leaves out the {part} of this answer, so "
                    "what the target wrote cannot be told; put it into the content as the target wrote it, remove the "
                    "conversation, or use another template"
                )
            shortest = min(shortest, shared_end(whole, altered))
        return shortest

    def _with_altered(self, index: int, part: str, whole: str, last: int, *, prompt: bool = False) -> str:
        """The messages up to `last`, with a mark that is not in `whole` at the end of a part of message `index`."""
        messages = self.conversation.messages[: last + 1]
        mark = next(mark for mark in MARKS if mark not in whole)
        messages[index] = with_mark(messages[index], part, mark)
        return self.text(messages, prompt=prompt)

    def _behind_previous(self, index: int, whole: str, body: str, prompt: str) -> str | None:
        """What was written, where the template renders the messages before otherwise once the answer is there, but
        puts between the last of them and the answer what it did in the prompt; None where it does not."""
        if index == 0:
            return None
        part = parts_of(self.conversation.messages[index - 1])[-1]
        shared = shared_end(prompt, self._with_altered(index - 1, part, prompt, index - 1, prompt=True))
        between = prompt[len(prompt) - shared :]
        shared = shared_end(whole, self._with_altered(index - 1, part, whole, index))
        begin = len(whole) - shared
        if between == prompt or begin == 0 or not body.startswith(between, begin):
            return None
        return body[begin + len(between) :]

    def _drops(self, index: int, whole: str, prompt: str) -> bool:
        """Whether the template, once the answer is there, drops the end of its generation prompt together with what
        the answer begins with: a think block, opened by the prompt and closed by the target."""
        message = self.conversation.messages[index]
        opening = prompt[shared_start(prompt, whole) :]
        opened = message | {"content": opening + (message["content"] or "")}
        return self.text([*self.conversation.messages[:index], opened]) == whole
