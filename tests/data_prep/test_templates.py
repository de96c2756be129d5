"""Masks: eleven chat formats against an oracle that puts texts together by hand, and the faults that others had."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data_prep.conversations import Conversation, Rendered, parse_conversation, prompt_ids, render, render_all
from heads.errors import HeadwayError
from tests.data_prep.chat_formats import CHATML, FORMATS, Format

PIECES = [
    "the cat sat", " on", "\n", "\n\n", "  ", "日本語", "🎈🏽", "é", "12", "\t", "\u2028", "assistant\n", "user", " {\"a\": 1}",
]  # fmt: skip
CONVERSATIONS = 300
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}, {"name": "日"}]
Owned = tuple[list[int], list[int]]


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


OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen 3, thinking": {"enable_thinking": True},
    "Qwen 3, not thinking": {"enable_thinking": False},
    "gpt-oss": {"reasoning_effort": "high"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_masks_equal_the_oracle(tiny_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    chat, talk = FORMATS[name], Talk(name, 7)
    tokenizers = [tokenizer_of(chat, tiny_tokenizer, trim) for trim in (False, True)]
    several = supervised = 0
    for number in range(CONVERSATIONS):
        conversation, tokenizer = talk.conversation(number), tokenizers[number % 2]
        sequences = render_all(tokenizer, conversation, stops_of(chat, tokenizer))
        assert [(each.ids, each.turn) for each in sequences] == oracle(chat, tokenizer, conversation), conversation
        assert [each.id for each in sequences] == [
            f"c{number}",
            *(f"c{number}#{n + 2}" for n in range(len(sequences))),
        ][:-1]
        several += len(sequences) > 1
        supervised += sum(map(bool, sequences[0].turn))
    assert supervised > 5 * CONVERSATIONS
    # Every answer trimmed or stripped makes the next one's prompt another text; where nothing is, one sequence does.
    rewriting = name not in ("ChatML", "Phi", "Qwen 2.5", "plain roles")
    assert several > CONVERSATIONS / 10 if rewriting else several == 0


def test_alphabet_of_the_oracle() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_masks_equal_those_of_generation_markers(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """transformers tracks what stands inside `generation` tags: another way to the same mask."""
    tagged = """
{%- for m in messages -%}
{{ '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.role == 'assistant' -%}{% generation %}{{- m.content ~ '<|im_end|>' -}}{% endgeneration %}
{%- else -%}{{ m.content ~ '<|im_end|>' }}{%- endif -%}{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
    chat = FORMATS["ChatML"]
    tokenizer, talk = tokenizer_of(chat, tiny_tokenizer), Talk("ChatML", 3)
    for number in range(40):
        messages = talk.conversation(number).messages
        theirs = tokenizer.apply_chat_template(
            messages, chat_template=tagged, return_dict=True, return_assistant_tokens_mask=True
        )
        ours = render(tokenizer, Conversation("a", messages), stops_of(chat, tokenizer))
        assert ours.ids == theirs["input_ids"][: len(ours.ids)]
        assert [int(turn > 0) for turn in ours.turn] == theirs["assistant_masks"][: len(ours.ids)]
        assert not any(theirs["assistant_masks"][len(ours.ids) :])


# --- the faults that others had, by the number they have in the list of cases

ASK = {"role": "user", "content": "the cat"}
SAY = {"role": "assistant", "content": "sat on a mat"}
THINK = SAY | {"reasoning_content": "hm"}


def render_with(
    base: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]], **fields: Any
) -> tuple[list[Rendered], PreTrainedTokenizerFast]:
    tokenizer = tokenizer_of(FORMATS[name], base)
    row = {"id": "odd-one", "messages": messages, **fields}
    return render_all(tokenizer, parse_conversation(row, "here"), stops_of(FORMATS[name], tokenizer)), tokenizer


def learnt(rendered: Rendered, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The supervised text of each turn."""
    numbers = sorted(set(rendered.turn) - {0})
    of_turn = [[t for t, turn in zip(rendered.ids, rendered.turn, strict=True) if turn == number] for number in numbers]
    return [tokenizer.decode(ids) for ids in of_turn]


def test_case_6_without_generation_markers(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Masked by rendering prefixes where that tells, else refused with the reason; never nothing, never everything."""
    (rendered,), tokenizer = render_with(tiny_tokenizer, "ChatML", [ASK, SAY, ASK, SAY])
    assert learnt(rendered, tokenizer) == ["sat on a mat<|im_end|>"] * 2
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}Q{% endif %}"
    )
    with pytest.raises(HeadwayError, match=r"'odd-one', message 2: .* otherwise than its generation prompt"):
        render_all(tokenizer, Conversation("odd-one", [ASK, SAY]), [tokenizer.eos_token_id])


@pytest.mark.parametrize("options", [{"enable_thinking": False}, None])
def test_case_7_an_empty_think_block_is_the_prompts(
    tiny_tokenizer: PreTrainedTokenizerFast, options: dict[str, Any] | None
) -> None:
    (rendered,), tokenizer = render_with(tiny_tokenizer, "Qwen 3, not thinking", [ASK, SAY], template_options=options)
    assert rendered.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nsat on a mat<|im_end|>")
    assert learnt(rendered, tokenizer) == ["sat on a mat<|im_end|>"]


def test_case_7_an_empty_think_block_that_the_target_wrote_is_learnt(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    block = "<think>\n\n</think>\n\n"
    for messages, options in (
        ([ASK, SAY], {"enable_thinking": True}),  # said: the prompt did not supply it
        ([ASK, SAY | {"content": f"{block}sat on a mat"}], None),  # there in its own words
    ):
        (rendered,), tokenizer = render_with(tiny_tokenizer, "Qwen 3, thinking", messages, template_options=options)
        assert learnt(rendered, tokenizer) == [f"{block}sat on a mat<|im_end|>"]


@pytest.mark.parametrize("name", FORMATS)
def test_case_8_the_terminator_is_supervised_and_is_last(tiny_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    chat = FORMATS[name]
    say = SAY | {"content": "hm\n</think>\n\nsat"} if chat.thinks == "content" else SAY
    (rendered,), tokenizer = render_with(tiny_tokenizer, name, [ASK, say])
    assert (rendered.ids[-1], rendered.turn[-1]) == (tokenizer.convert_tokens_to_ids(chat.ends(say)), 1)


def test_case_8_the_terminator_is_the_first_stop_token_behind_the_words(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Not the one that the words hold, nor the one that the template closes the whole conversation with."""
    (rendered,), tokenizer = render_with(tiny_tokenizer, "Phi", [ASK, SAY | {"content": "a<|endoftext|>b<|end|>c"}])
    assert learnt(rendered, tokenizer) == ["a<|endoftext|>b<|end|>c<|end|>"]
    call = {"function": {"name": "look", "arguments": {"<|eot_id|>": ["<|eom_id|>", 1]}}}
    (rendered,), tokenizer = render_with(
        tiny_tokenizer, "Llama 3", [ASK, SAY | {"content": None, "tool_calls": [call]}]
    )
    assert learnt(rendered, tokenizer) == [
        '{"name": "look", "parameters": {"<|eot_id|>": ["<|eom_id|>", 1]}}<|eot_id|>'
    ]


def test_case_9_repeats_markers_and_empty_answers(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    answers = ["the cat", "<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>", "", "the cat"]
    messages = [each for answer in answers for each in (ASK, SAY | {"content": answer})]
    for start in ([], [{"role": "system", "content": "the cat<|im_end|>"}]):
        (rendered,), tokenizer = render_with(tiny_tokenizer, "ChatML", [*start, *messages])
        assert learnt(rendered, tokenizer) == [f"{answer}<|im_end|>" for answer in answers]


def test_case_9_ends_in_mid_turn(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for messages, name, says in (
        ([ASK, SAY], "ChatML", "sat on a mat"),
        ([ASK, SAY | {"content": ""}], "ChatML", ""),
        ([ASK, SAY | {"content": " sat \n"}], "Gemma", " sat \n"),
        ([ASK, THINK], "Qwen 3, thinking", "<think>\nhm\n</think>\n\nsat on a mat"),
        ([ASK, THINK | {"content": None}], "Qwen 3, thinking", "<think>\nhm"),
        ([ASK, THINK | {"content": ""}], "gpt-oss", "<|channel|>analysis<|message|>hm"),
        ([ASK, SAY | {"content": "hm"}], "DeepSeek", "hm"),
    ):
        (rendered,), tokenizer = render_with(tiny_tokenizer, name, messages, finish_reason="length")
        assert "".join(learnt(rendered, tokenizer)) == says
        assert rendered.text.endswith(says)


@pytest.mark.parametrize("name", ["Qwen 3, thinking", "DeepSeek", "gpt-oss"])
def test_case_9_earlier_thinking_that_the_template_strips(tiny_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Each answer is learnt with its own thinking, behind a prompt without the earlier one, as the target saw it."""
    chat = FORMATS[name]
    think = SAY | {"content": "hm\n</think>\n\nsat on a mat"} if chat.thinks == "content" else THINK
    sequences, tokenizer = render_with(tiny_tokenizer, name, [ASK, think, ASK, think])
    assert [each.id for each in sequences] == ["odd-one", "odd-one#2"]
    says = chat.written(think, {}, False) + chat.ends(think)
    for number, (rendered, before) in enumerate(zip(sequences, ([ASK], [ASK, think, ASK]), strict=True), 1):
        prompt = prompt_ids(tokenizer, before)
        assert rendered.ids[: len(prompt)] == prompt
        assert rendered.turn == [0] * len(prompt) + [number] * (len(rendered.ids) - len(prompt))
        assert learnt(rendered, tokenizer) == [says]
        assert rendered.text.count("hm") == 1
    with pytest.raises(HeadwayError, match=r"'odd-one': the chat template strips or rewrites .* takes 2 sequences"):
        render(tokenizer, Conversation("odd-one", [ASK, think, ASK, think]), stops_of(chat, tokenizer))


# --- what else a template can do


def test_white_space_that_the_template_trims_is_learnt(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("Gemma", "Llama 3"):
        chat = FORMATS[name]
        sequences, tokenizer = render_with(tiny_tokenizer, name, [ASK, SAY | {"content": " sat \n"}, ASK, SAY])
        assert [learnt(each, tokenizer) for each in sequences] == [
            [" sat \n" + chat.stops[-1]],
            ["sat on a mat" + chat.stops[-1]],
        ]
        assert " sat \n" not in sequences[1].text  # as a prompt the target saw it trimmed


def test_thinking_that_the_template_does_not_show_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for name, messages in (
        ("ChatML", [ASK, THINK]),
        ("DeepSeek", [ASK, THINK]),
        ("Llama 3", [ASK, SAY | {"tool_calls": [{"function": {"name": "look"}}]}]),
    ):
        with pytest.raises(HeadwayError, match=r"'odd-one', message 2: .* leaves out the (reasoning|content)"):
            render_with(tiny_tokenizer, name, messages)
    with pytest.raises(HeadwayError, match="otherwise than its generation prompt"):
        render_with(tiny_tokenizer, "DeepSeek", [ASK, SAY])  # no thinking, though the prompt begins some


def test_tools_and_options_reach_the_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    (rendered,), tokenizer = render_with(
        tiny_tokenizer, "gpt-oss", [ASK, SAY], tools=TOOLS, template_options={"reasoning_effort": "low"}
    )
    assert "Reasoning: low<|end|>" in rendered.text
    assert '"name": "look"' in rendered.text
    prompt = prompt_ids(tokenizer, [ASK], TOOLS, {"reasoning_effort": "low"})
    assert rendered.ids[: len(prompt)] == prompt
    with pytest.raises(HeadwayError, match="refuses 2 of its messages"):
        render_with(tiny_tokenizer, "gpt-oss", [ASK, SAY], template_options={"conversation": 1})


def test_an_answer_without_a_question(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(HeadwayError, match=r"'odd-one': the chat template refuses 0 of its messages"):
        render_with(tiny_tokenizer, "ChatML", [SAY])


def test_supervised_tokens_are_what_decoding_would_write(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    (rendered,), tokenizer = render_with(tiny_tokenizer, "ChatML", [ASK, SAY, ASK, SAY])
    for number, messages in ((1, [ASK]), (2, [ASK, SAY, ASK])):
        prompt = prompt_ids(tokenizer, messages)
        answer = tokenizer("sat on a mat<|im_end|>", add_special_tokens=False)["input_ids"]
        assert rendered.ids[: len(prompt) + len(answer)] == prompt + answer
        places = [t for t, turn in enumerate(rendered.turn) if turn == number]
        assert places == [*range(len(prompt), len(prompt) + len(answer))]


def test_max_length_cuts_every_sequence(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    whole, tokenizer = render_with(tiny_tokenizer, "Qwen 3, thinking", [ASK, THINK, ASK, THINK])
    conversation, stops = Conversation("odd-one", [ASK, THINK, ASK, THINK]), stops_of(FORMATS["ChatML"], tokenizer)
    for short, long in zip(render_all(tokenizer, conversation, stops, 20), whole, strict=True):
        assert (short.ids, short.turn, short.extents) == (long.ids[:20], long.turn[:20], long.extents[:20])


def test_messages_behind_the_last_answer_are_left_out(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert (
        render_with(tiny_tokenizer, "ChatML", [ASK, SAY, ASK])[0]
        == render_with(tiny_tokenizer, "ChatML", [ASK, SAY])[0]
    )


@pytest.mark.parametrize(
    ("template", "stop", "says"),
    [
        (CHATML, "<|endoftext|>", "assistant turn 1: the chat template ends it with none of the target's stop tokens"),
        ("{{ raise_exception('roles must alternate') }}", "<|im_end|>", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "<|im_end|>", "refuses 2 of its messages .can only concatenate str"),
        ("{{ messages[0].content }}<|im_end|>", "<|im_end|>", "message 2: the chat template leaves out the content"),
        (None, "<|im_end|>", "no chat template"),
    ],
)
def test_templates_that_cannot_be_masked(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str | None, stop: str, says: str
) -> None:
    tokenizer = tokenizer_of(FORMATS["ChatML"], tiny_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(HeadwayError, match=says) as caught:
        render_all(tokenizer, Conversation("odd-one", [ASK, SAY]), [tokenizer.convert_tokens_to_ids(stop)])
    assert "odd-one" in str(caught.value)
