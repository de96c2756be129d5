"""Random conversations in a chat format, and an oracle of their masks that puts the texts together by hand."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from data_prep.conversations import Conversation
from tests.data_prep.chat_formats import FORMATS, Format

PIECES = [
    "the cat sat", " on", "\n", "\n\n", "  ", "日本語", "🎈🏽", "é", "12", "\t", "\u2028", "assistant\n", "user", " {\"a\": 1}",
]  # fmt: skip


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}, {"name": "日"}]


Owned = tuple[list[int], list[int]]
OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen 3, thinking": {"enable_thinking": True},
    "Qwen 3, not thinking": {"enable_thinking": False},
    "gpt-oss": {"reasoning_effort": "high"},
}


def tokenizer_of(chat: Format, base: PreTrainedTokenizerFast, trim: bool = False) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a format's special tokens; `trim` leaves leading blanks out of the offsets, as GPT-2."""
    tokens = Tokenizer.from_str(base.backend_tokenizer.to_str())
    tokens.add_special_tokens([AddedToken(each, rstrip=chat.swallows, normalized=False) for each in chat.specials])
    tokens.post_processor = processors.ByteLevel(trim_offsets=trim)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token=chat.bos, eos_token=chat.stops[0], chat_template=chat.template
    )


def stops_of(chat: Format, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(stop) for stop in chat.stops]


def oracle(chat: Format, tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[Owned]:
    """Ids and turn numbers of each sequence. Texts are put together without the template engine, every byte has an
    owner, and a token is supervised when the answer owns all its bytes, which are read off the byte-level alphabet."""
    texts: list[tuple[str, list[int]]] = []
    number = 0
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        number += 1
        cut = conversation.finish_reason == "length" and index == len(conversation.messages) - 1
        prompt = chat.prompt(conversation.messages[:index], conversation.tools, conversation.template_options)
        said = chat.written(message, conversation.template_options, cut) + ("" if cut else chat.ends(message))
        owners = [0] * len(prompt.encode()) + [number] * len(said.encode())
        if texts and prompt.startswith(texts[-1][0]):
            earlier = texts.pop()[1]
            owners[: len(earlier)] = earlier
        texts.append((prompt + said, owners))
    return [owned_tokens(chat, tokenizer, text, owners) for text, owners in texts]


def owned_tokens(chat: Format, tokenizer: PreTrainedTokenizerFast, text: str, owners: list[int]) -> Owned:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    alphabet, whole, turn, position = byte_alphabet(), text.encode(), [], 0
    for token in tokenizer.convert_ids_to_tokens(ids):
        special = token in chat.specials
        raw = token.encode() if special else bytes(alphabet[character] for character in token)
        assert whole[position : position + len(raw)] == raw
        found = set(owners[position : position + len(raw)])
        turn.append(found.pop() if len(found) == 1 else 0)
        position += len(raw)
        if special and chat.swallows:
            rest = whole[position:].decode()
            position += len(rest[: len(rest) - len(rest.lstrip())].encode())
    assert position == len(whole)
    return ids, turn


def byte_alphabet() -> dict[str, int]:
    """Characters of byte-level BPE to bytes: printable Latin-1 stands for itself, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Talk:
    """Random conversations that a format can hold; texts hold its markers, line ends, nothing at all."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.chat, self.source = name, FORMATS[name], random.Random(seed)
        self.markers = [each for each in self.chat.specials if "think>" not in each]

    def text(self, most: int = 5) -> str:
        return "".join(self.source.choices([*PIECES, *self.markers], k=self.source.randint(0, most)))

    def thought(self) -> str:
        return f"hm {self.text(3)}.".strip("\n")

    def conversation(self, number: int) -> Conversation:
        source, chat = self.source, self.chat
        messages: list[dict[str, Any]] = []
        if chat.system and source.random() < 0.3:
            messages.append({"role": "system", "content": "be kind" + self.text(1)})
        tools = TOOLS if chat.tools and source.random() < 0.3 else None
        for _ in range(source.choice([1, 1, 2, 3])):
            messages.append({"role": "user", "content": self.text()})
            while tools and source.random() < 0.3:
                messages += self.tool_use()
            messages.append(self.answer())
        finish = source.choice(["stop", "length"])
        if finish == "length" and source.random() < 0.3:  # cut while it was thinking
            if "reasoning_content" in messages[-1]:
                messages[-1]["content"] = None
            elif chat.thinks == "content":
                messages[-1]["content"] = self.thought()
        options = source.choice([{}, OPTIONS.get(self.name, {})])
        return Conversation(f"c{number}", messages, finish, tools, options)

    def answer(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text()}
        if self.chat.thinks == "content":
            message["content"] = f"{self.thought()}\n</think>\n\n{message['content']}"
        if self.chat.thinks == "field" and (self.name.startswith("Qwen") or self.source.random() < 0.7):
            message = {"reasoning_content": self.thought(), **message, "content": message["content"].lstrip("\n")}
        return message

    def tool_use(self) -> list[dict[str, Any]]:
        qwen = self.name.startswith("Qwen")
        several = qwen or self.name == "Mistral"
        arguments = [{}, {"city": self.text(2), "n": 3}, {self.text(1): [True, None, self.text(2)]}]
        calls = [
            {"type": "function", "function": {"name": "look", "arguments": self.source.choice(arguments)}}
            for _ in range(self.source.randint(1, 2 if several else 1))
        ]
        said = self.source.choice([None, "I look."]) if qwen else None
        message = self.answer() | {"content": said, "tool_calls": calls}
        return [message, *({"role": "tool", "content": self.text()} for _ in calls)]
