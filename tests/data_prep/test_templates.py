"""Masks: eleven chat formats against an oracle that puts texts together by hand, and the faults that others had."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.conversations import Conversation, Rendered, parse_conversation, prompt_ids, render, render_all
from heads.errors import HeadwayError
from tests.data_prep.chat_formats import CHATML, FORMATS
from tests.data_prep.mask_oracle import TOOLS, Talk, byte_alphabet, oracle, stops_of, tokenizer_of

CONVERSATIONS = 300


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
