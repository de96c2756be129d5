"""Which answers are kept, and as what message: exact ids, blanks, thoughts and tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.conversations import read_conversations
from data_prep.dialogue import Answer, Dialogue, read_answer
from data_prep.prompts import Prompt
from data_prep.regenerate import regenerate
from heads.errors import HeadwayError
from tests.conftest import write_conversations
from tests.data_prep.regenerating import Make, Serve, as_expected, make_prompts, rows_of


def test_without_ids_the_text_is_checked(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve(with_ids=False)
    regenerate(regeneration(server=server.url))
    assert as_expected(regeneration(), tiny_tokenizer, make_prompts(24))
    ids = [ids for row in rows_of(regeneration().out) for ids in row["token_ids"]]
    assert all(each[-1] == tiny_tokenizer.eos_token_id for each in ids)


def test_ids_that_the_text_does_not_give(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """A target that writes `the` letter by letter: its text would be learnt as one token that it never wrote."""
    split = tiny_tokenizer.convert_tokens_to_ids(["t", "h", "e"])
    assert tiny_tokenizer.tokenize("the") == ["the"]

    def answer(body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        said = server.say(body, prompt)
        if len(body["messages"]) > 2:
            said |= {"token_ids": [*split, tiny_tokenizer.eos_token_id], "message": {"content": "the"}}
        return said

    server = serve(answer=answer)
    totals = regenerate(regeneration(server=server.url))
    assert totals is not None
    reason = "the text is not tokenised to what the target wrote"
    several = [row for row in make_prompts(24) if sum(each["role"] == "user" for each in row["messages"]) > 1]
    assert (totals.conversations, totals.answers) == (24, 24)
    assert totals.ended_early == {reason: len(several)}
    assert all(len(row["token_ids"]) == 1 for row in rows_of(regeneration().out))


def test_blank_answers_are_left_out(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    def answer(body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        blank = {"message": {"content": ""}, "token_ids": [tiny_tokenizer.eos_token_id], "finish_reason": "stop"}
        return blank if body["messages"][-1]["content"].startswith("4 ") else server.say(body, prompt)

    server = serve(answer=answer)
    totals = regenerate(regeneration(server=server.url))
    assert totals is not None
    assert totals.left_out == {"the answer is blank": 1}
    assert [row["id"] for row in rows_of(regeneration().out)] == [
        f"p{number:03d}" for number in range(24) if number != 4
    ]
    server.answer = lambda body, prompt: {
        "message": {"content": None},
        "token_ids": [tiny_tokenizer.eos_token_id],
        "finish_reason": "stop",
    }
    regeneration().out.unlink()
    with pytest.raises(HeadwayError, match="no answer can be kept: 24 x the answer is blank"):
        regenerate(regeneration(server=server.url))


THINKING = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome"}}}


@pytest.fixture
def thinking_dir(tmp_path: Path, tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """The tiny target with a template that has thoughts and tools."""
    folder = tmp_path / "thinking"
    folder.mkdir()
    for path in tiny_target_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target_dir)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder)
    return folder


def written(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def tool_prompt(names: list[str]) -> dict[str, Any]:
    """A question, the results of the tools that somebody else's model called, and another question."""
    calls = [
        {"id": f"old{n}", "type": "function", "function": {"name": name, "arguments": {}}}
        for n, name in enumerate(names)
    ]
    results = [{"role": "tool", "content": f"sun {n}", "tool_call_id": f"old{n}"} for n, _ in enumerate(names)]
    asked = [
        {"role": "user", "content": "how is it in Rome"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    return {"id": "t1", "messages": [*asked, *results, {"role": "user", "content": "thank you"}], "tools": TOOLS}


@pytest.mark.parametrize("parsed", [True, False], ids=["the server reads calls", "raw text"])
def test_tools_and_thoughts(regeneration: Make, serve: Serve, thinking_dir: Path, parsed: bool) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(thinking_dir)
    call_text = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    texts = [f"<think>\nthe sun\n</think>\n\nlet me see{call_text}", "it is red", "<think>\nwell\n</think>\n\ngood"]
    messages: list[dict[str, Any]] = [
        {
            "content": "let me see",
            "reasoning": "the sun",
            "tool_calls": [
                {"id": "new1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome"}'}}
            ],
        },
        {"content": "it is red"},
        {"content": "good", "reasoning": "well"},
    ]

    def answer(body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message = messages[turn] if parsed else {"content": texts[turn]}
        return {"message": message, "token_ids": written(tokenizer, texts[turn]), "finish_reason": "stop"}

    server = serve(answer=answer)
    server.tokenizer = tokenizer
    write_conversations(regeneration().prompts, [tool_prompt(["weather"])])
    totals = regenerate(regeneration(server=server.url, target=str(thinking_dir)))
    assert totals is not None
    assert (totals.answers, totals.ended_early) == (3, {})
    (row,) = rows_of(regeneration().out)
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    first, result = row["messages"][1:3]
    assert (first["content"], first["reasoning_content"]) == ("let me see", "the sun")
    assert first["tool_calls"][0]["function"] == CALL["function"]
    assert result["tool_call_id"] == ("new1" if parsed else "old0")
    assert row["messages"][-1]["reasoning_content"] == "well"
    assert row["token_ids"] == [written(tokenizer, text) for text in texts]
    assert row["tools"] == TOOLS
    assert all(body["tools"] == TOOLS for body in server.bodies)
    read_conversations(regeneration().out)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["weather", "weather"], "tool turns follow, but the answer did not call those tools"),
        ([], "the answer called tools whose results are not there"),
    ],
)
def test_results_of_other_calls(thinking_dir: Path, names: list[str], says: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(thinking_dir)
    row = tool_prompt(names)
    if not names:
        row["messages"].pop(1)
    dialogue = Dialogue(Prompt("t1", row["messages"], TOOLS, "row 1"), tokenizer, [tokenizer.eos_token_id], {})
    ids = written(tokenizer, '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    assert dialogue.take(Answer(ids, len(ids), cut=False)) is not None
    assert dialogue.ended
    assert dialogue.left_out == says
    assert [message["role"] for message in dialogue.row({})["messages"]] == ["user", "assistant"]


def test_reading_an_answer() -> None:
    def read(text: str, *, with_calls: bool = True) -> dict[str, Any]:
        return {key: value for key, value in read_answer(text, with_calls=with_calls).items() if key != "role"}

    assert read("plain") == {"content": "plain"}
    assert read("<think>\na\n</think>\n\nb") == {"reasoning_content": "a", "content": "b"}
    assert read("a</think>b") == {"reasoning_content": "a", "content": "b"}
    assert read("b <think>a</think>") == {"reasoning_content": "b <think>a", "content": ""}
    assert read('<tool_call>{"name": "f"}</tool_call>') == {
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }
    for bad in ("<tool_call>{]</tool_call>", '<tool_call>{"name": 3}</tool_call>', "<tool_call>[]</tool_call>"):
        assert read(bad) == {"content": bad}
    assert read('<tool_call>{"name": "f"}</tool_call>', with_calls=False)["content"].startswith("<tool_call>")
