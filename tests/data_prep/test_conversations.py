"""Conversations: masks against a byte-by-byte oracle, every refusal, a stable split."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data_prep import conversations as script
from data_prep.conversations import (
    SAMPLES,
    Conversation,
    Rendered,
    parse_conversation,
    prompt_ids,
    read_conversations,
    render,
    split_heldout,
)
from heads.errors import HeadwayError, run_script

STOP = "<|im_end|>"
# Written by hand here and as Jinja: the oracle puts the text together without the template engine.
LAYOUTS = {
    "chatml": ("<|im_start|>{role}\n", "{content}<|im_end|>", "\n", "<|im_start|>assistant\n"),
    "blank before the answer": ("{role}: ", "{content}<|im_end|>", " ", "assistant: "),
    "think block": (
        "<|im_start|>{role}\n",
        "{content}<|im_end|>",
        "\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
}
PIECES = [
    "the cat sat", " on", "\n", "\n\n", "  ", "日本語", "🎈🏽", "é", "<|im_end|>", "<|im_start|>", "assistant\n",
    "<|im_start|>assistant\nthe cat sat<|im_end|>", "12", "\t", "</think>", "\u2028",
]  # fmt: skip


def jinja_template(layout: tuple[str, str, str, str]) -> str:
    """The chat template of a layout; assistant turns begin with its generation prompt."""
    head, body, tail, opening = (part.replace("\n", "\\n") for part in layout)
    head = "'" + head.replace("{role}", "' + m['role'] + '") + "'"
    body = "'" + body.replace("{content}", "' + m['content'] + '") + f"{tail}'"
    return (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '" + opening + "' }}"
        "{% else %}{{ " + head + " }}{% endif %}{{ " + body + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + opening + "' }}{% endif %}"
    )


def oracle(tokenizer: Any, conversation: Conversation, layout: tuple[str, str, str, str]) -> Rendered:
    """Text put together by hand with a turn number for each byte; a token is supervised when all its bytes are, its
    bytes being read off the byte-level alphabet."""
    head, body, tail, opening = layout
    text, owner, number = "", [], 0

    def add(part: str, turn: int) -> None:
        nonlocal text
        text += part
        owner.extend([turn] * len(part.encode()))

    for message in conversation.messages:
        written = message["role"] == "assistant"
        number += written
        add(opening if written else head.format(role=message["role"]), 0)
        add(body.format(content=message["content"]), number if written else 0)
        add(tail, 0)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    alphabet = byte_alphabet()
    turn, position = [], 0
    for token in tokenizer.convert_ids_to_tokens(ids):
        special = token in tokenizer.all_special_tokens
        raw = token.encode() if special else bytes(alphabet[character] for character in token)
        owners = set(owner[position : position + len(raw)])
        assert text.encode()[position : position + len(raw)] == raw
        turn.append(owners.pop() if len(owners) == 1 else 0)
        position += len(raw)
    if conversation.finish_reason == "length":
        end = max(t for t in range(len(ids)) if turn[t] == number and ids[t] == tokenizer.eos_token_id)
        ids, turn = ids[:end], turn[:end]
    return Rendered(ids, turn)


def byte_alphabet() -> dict[str, int]:
    """Characters of byte-level BPE to bytes: printable Latin-1 stands for itself, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def random_conversation(source: random.Random, number: int) -> Conversation:
    messages = [{"role": "system", "content": "be kind"}] if source.random() < 0.3 else []
    for _ in range(source.randint(1, 3)):
        for role in ("user", "assistant"):
            content = "".join(source.choices(PIECES, k=source.randint(0, 5)))
            messages.append({"role": role, "content": content})
    return Conversation(f"c{number}", messages, source.choice(["stop", "length"]))


def with_template(tokenizer: PreTrainedTokenizerFast, template: str, trim: bool = False) -> PreTrainedTokenizerFast:
    """A copy with another chat template; `trim` leaves leading blanks out of the offsets, as GPT-2 does."""
    changed = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        eos_token=STOP,
        pad_token=STOP,
    )
    changed.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    changed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_masks_equal_the_oracle(tiny_tokenizer: PreTrainedTokenizerFast, name: str, trim: bool) -> None:
    tokenizer = with_template(tiny_tokenizer, jinja_template(LAYOUTS[name]), trim)
    source = random.Random(7)
    for number in range(150):
        conversation = random_conversation(source, number)
        expected = oracle(tokenizer, conversation, LAYOUTS[name])
        assert render(tokenizer, conversation, [tokenizer.eos_token_id]) == expected, conversation


def test_alphabet_of_the_oracle() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_supervised_tokens_are_what_decoding_would_write(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": r, "content": c} for r, c in [("user", "the cat"), ("assistant", "sat on a mat")]] * 2
    rendered = render(tiny_tokenizer, Conversation("a", messages), [tiny_tokenizer.eos_token_id])
    for number, index in ((1, 1), (2, 3)):
        prompt = prompt_ids(tiny_tokenizer, messages[:index])
        answer = tiny_tokenizer("sat on a mat" + STOP, add_special_tokens=False)["input_ids"]
        assert rendered.ids[: len(prompt) + len(answer)] == prompt + answer
        assert [t for t, turn in enumerate(rendered.turn) if turn == number] == [
            *range(len(prompt), len(prompt) + len(answer))
        ]


def test_cut_answer_has_no_terminator(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "the cat sat"}]
    stop = tiny_tokenizer.eos_token_id
    whole = render(tiny_tokenizer, Conversation("a", messages), [stop])
    cut = render(tiny_tokenizer, Conversation("a", messages, "length"), [stop])
    assert whole.ids[len(cut.ids)] == stop
    assert whole.turn[len(cut.ids) :] == [1] + [0] * (len(whole.ids) - len(cut.ids) - 1)
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert cut.turn == whole.turn[: len(cut.ids)]
    short = render(tiny_tokenizer, Conversation("a", messages), [stop], max_length=len(cut.ids) - 1)
    assert (short.ids, short.turn) == (cut.ids[:-1], cut.turn[:-1])


def test_empty_answer_supervises_its_terminator_alone(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": ""}]
    rendered = render(tiny_tokenizer, Conversation("a", messages), [tiny_tokenizer.eos_token_id])
    assert [token for token, turn in zip(rendered.ids, rendered.turn, strict=True) if turn] == [
        tiny_tokenizer.eos_token_id
    ]


TURNS = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]


@pytest.mark.parametrize(
    ("template", "stop", "says"),
    [
        (
            (
                "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last or m['role'] == 'user' %}"
                "{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
            ),
            STOP,
            "message 2: the chat template strips or rewrites earlier turns",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}Q{% endif %}",
            STOP,
            "message 2: the chat template strips or rewrites earlier turns",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
            "<|endoftext|>",
            "none of the target's stop",
        ),
        ("{{ raise_exception('roles must alternate') }}", STOP, "roles must alternate"),
        (None, STOP, "no chat template"),
    ],
)
def test_templates_that_cannot_be_masked(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str | None, stop: str, says: str
) -> None:
    tokenizer = with_template(tiny_tokenizer, template or "")
    with pytest.raises(HeadwayError, match=says) as caught:
        render(tokenizer, Conversation("odd-one", TURNS), [tokenizer.convert_tokens_to_ids(stop)])
    assert "odd-one" in str(caught.value)


GOOD: dict[str, Any] = {"id": "a", "messages": TURNS[:2]}


def rows(*changes: dict[str, Any] | bytes) -> bytes:
    """File content: bytes as they are, dicts as GOOD with changes."""
    return b"\n".join(c if isinstance(c, bytes) else json.dumps(GOOD | c).encode() for c in changes) + b"\n"


BAD = {
    "malformed at line 7": (rows(*({"id": f"r{n}"} for n in range(6)), b'{"messages": ['), "line 7: malformed JSON"),
    "empty": (b"", "the file is empty"),
    "blank": (b"\n \n", "the file is empty"),
    "not an object": (rows({}, b"[1]"), "line 2: a list instead of an object"),
    "no messages": (b'{"id": "a"}', "line 1: no 'messages'"),
    "empty messages": (rows({"messages": []}), "line 1: 'messages' is not a list"),
    "messages a string": (rows({"messages": "hi"}), "line 1: 'messages' is not a list"),
    "message a string": (rows({"messages": ["hi"]}), "line 1: message 1: a string instead of an object"),
    "unknown role": (rows({"messages": [{"role": "bot", "content": ""}]}), "message 1: unknown role 'bot'"),
    "role a list": (rows({"messages": [{"role": ["user"], "content": ""}]}), "message 1: unknown role"),
    "no content": (rows({"messages": [{"role": "user"}]}), "message 1: 'content' is missing"),
    "content a list": (rows({"messages": [{"role": "user", "content": []}]}), "'content' is a list"),
    "half a surrogate": (rows({"messages": [{"role": "user", "content": "\ud83c"}]}), "half a surrogate"),
    "no answer": (rows({}, {"id": "b", "messages": TURNS[:1]}), "line 2: no assistant turn"),
    "finish": (rows({"finish_reason": "eos"}), "line 1: finish_reason 'eos'"),
    "finish a list": (rows({"finish_reason": ["stop"]}), r"line 1: finish_reason \['stop'\]"),
    "length without answer": (
        rows({"messages": TURNS[:3], "finish_reason": "length"}),
        "the last message is the user's",
    ),
    "tools": (rows({"tools": [{"name": "f"}]}), "'tools'"),
    "id a number": (rows({"id": 3}), "line 1: 'id' is a number"),
    "id blank": (rows({"id": " "}), "line 1: 'id' is a string"),
    "same id": (rows({}, {"id": "b"}, b"", {}), "line 4: id 'a' is that of line 1"),
    "same content": (rows({"id": None}, {"id": None}), "line 2: id 'row-.*' is that of line 1"),
    "bad UTF-8": (rows({}, b'{"id": "\xff"}'), "line 2: byte 9 is not UTF-8"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), "line 1: byte 1 is not UTF-8"),
    "too deep": (b"[" * 200_000, "line 1: "),
    "too many digits": (b'{"id": ' + b"1" * 10_000 + b"}", "line 1: "),
    "two in a line": (rows(b"{} {}"), "line 1: malformed JSON at column 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(tmp_path: Path, name: str) -> None:
    content, says = BAD[name]
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(HeadwayError, match=says) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no such file"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(HeadwayError, match="is a folder"):
        read_conversations(tmp_path)


def test_odd_but_good_files(tmp_path: Path) -> None:
    text = "日本 🎈\u2028\u0000 é"
    messages = [TURNS[0], {"role": "assistant", "content": text, "extra": [1]}]
    path = tmp_path / "some.jsonl"
    lines = [json.dumps({"messages": messages, "source": 1}), "", json.dumps(GOOD | {"finish_reason": "length"})]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    first, second = read_conversations(path)
    assert (first.messages, first.finish_reason) == (messages, "stop")
    assert second == Conversation("a", TURNS[:2], "length")
    path.write_text(json.dumps({"source": 2, "messages": messages}, ensure_ascii=False), encoding="utf-8")
    assert read_conversations(path)[0].id == first.id  # the id depends on the content alone


def test_heldout_is_stable() -> None:
    everything = [Conversation(f"id-{n}", TURNS[:2]) for n in range(200)]
    training, heldout = split_heldout(everything, 20)
    assert len(heldout) == 20
    assert {each.id for each in training} | {each.id for each in heldout} == {each.id for each in everything}
    assert training == [each for each in everything if each not in heldout]
    shuffled = random.Random(1).sample(everything, 200)
    assert split_heldout(shuffled, 20)[1] == heldout
    assert split_heldout(everything, 30)[1][:20] == heldout
    more = [*everything, *(Conversation(f"new-{n}", TURNS[:2]) for n in range(20))]
    kept = [each for each in split_heldout(more, 20)[1] if each.id.startswith("id-")]
    assert kept == heldout[: len(kept)]  # what is held out of the old rows never changes sides to others of them
    assert split_heldout(everything, 0) == (everything, [])
    for count in (-1, 200):
        with pytest.raises(HeadwayError, match="0 to 199"):
            split_heldout(everything, count)


def test_parse_conversation_keeps_what_the_template_may_need() -> None:
    messages = [{"role": "user", "content": "a", "name": "Ann"}, TURNS[1]]
    assert parse_conversation({"messages": messages}, "here").messages == messages


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["conversations.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        run_script(script.main)
    return int(str(caught.value.code))


def test_show(
    tiny_conversations: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, target = str(tiny_conversations), str(tiny_target_dir)
    assert run_main(monkeypatch, "show", file, "--row", "2", "--target", target) == 0
    shown = " ".join(capsys.readouterr().out.split())
    conversation = read_conversations(file)[1]
    assert all(message["content"] in shown for message in conversation.messages)
    assert f"{conversation.id}: " in shown
    for arguments in (
        ["show", file, "--row", "99", "--target", target],
        ["show", file],
        ["show", file, "--raw", "1"],
        [],
    ):
        assert run_main(monkeypatch, *arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_bundled_set() -> None:
    samples = read_conversations(SAMPLES)
    assert 800 <= len(samples) <= 2000
    assert SAMPLES.stat().st_size <= 2_000_000
    assert [each.id for each in samples] == sorted(each.id for each in samples)
    assert all(message["content"].strip() for each in samples for message in each.messages)
