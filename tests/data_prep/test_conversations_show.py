"""A conversation shown: every character of it, its supervised tokens apart, shares, nothing that a page would run."""

from __future__ import annotations

import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data_prep import conversations as script
from data_prep.conversations import Conversation, read_conversations, render, render_all
from data_prep.show import page, pieces
from heads.errors import run_script
from tests.conftest import save_tiny_target, write_conversations
from tests.data_prep.chat_formats import FORMATS
from tests.data_prep.mask_oracle import stops_of, tokenizer_of

NASTY = "<script>alert('&amp;')</script> \"日本\" 🎈🏽\n\t  \x1b[31mred\x07 </pre><|im_end|>"


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["conversations.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        run_script(script.main)
    return int(str(caught.value.code))


class Spans(HTMLParser):
    """The boxes of a page: (supervised, title, text); text outside them is put together."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.boxes: list[list[Any]] = []
        self.tags: set[str] = set()
        self.rest, self.inside = "", False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "span":
            fields = dict(attrs)
            self.boxes.append([fields.get("class") == "learnt", fields["title"], ""])
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "span"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.boxes[-1][2] += data
        else:
            self.rest += data


@pytest.fixture
def nasty(tiny_tokenizer: PreTrainedTokenizerFast) -> Conversation:
    messages = [{"role": role, "content": NASTY} for role in ("user", "assistant", "user", "assistant")]
    return Conversation("<b>nasty", messages)


def test_pieces_are_the_text_cut_at_the_tokens(tiny_tokenizer: PreTrainedTokenizerFast, nasty: Conversation) -> None:
    rendered = render(tiny_tokenizer, nasty, [tiny_tokenizer.eos_token_id])
    found = list(pieces(rendered))
    text = rendered.text.replace("\x1b", "␛").replace("\x07", "␇")
    assert "".join(piece for piece, _ in found) == text
    assert [learnt for _, learnt in found] == [turn > 0 for turn in rendered.turn]
    for token, (piece, _) in zip(rendered.ids, found, strict=True):
        alone = tiny_tokenizer.decode([token])
        if "\ufffd" not in alone and piece not in "␛␇":  # a whole character at least
            assert piece == alone
    assert "" in [piece for piece, _ in found]  # tokens inside a character


def test_page_shows_every_token_and_runs_nothing(tiny_tokenizer: PreTrainedTokenizerFast, nasty: Conversation) -> None:
    rendered = render(tiny_tokenizer, nasty, [tiny_tokenizer.eos_token_id])
    shown = Spans(page("a < b", [rendered], ["<i>share</i>"]))
    assert shown.tags == {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "pre", "span"}
    assert [box[0] for box in shown.boxes] == [turn > 0 for turn in rendered.turn]
    assert [box[2].replace("↵", "") for box in shown.boxes] == [piece for piece, _ in pieces(rendered)]
    for (learnt, title, _), token, turn in zip(shown.boxes, rendered.ids, rendered.turn, strict=True):
        assert title == (f"id {token}, turn {turn}" if learnt else f"id {token}")
    assert "a < b" in shown.rest
    assert "<i>share</i>" in shown.rest
    assert "<b>nasty" in shown.rest


def test_show_prints_text_and_shares(
    tiny_conversations: Path,
    tiny_target_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_main(monkeypatch, "show", str(tiny_conversations), "--row", "2", "--target", str(tiny_target_dir)) == 0
    shown = capsys.readouterr().out
    everything = read_conversations(tiny_conversations)
    rendered = [render(tiny_tokenizer, each, [tiny_tokenizer.eos_token_id]) for each in everything]
    assert rendered[1].text in shown
    counts = [(sum(turn > 0 for turn in each.turn), len(each.ids)) for each in rendered]
    for name, supervised, tokens in (
        (f"{everything[1].id}: ", *counts[1]),
        (f"{tiny_conversations}, 24 conversations: ", sum(c[0] for c in counts), sum(c[1] for c in counts)),
    ):
        assert f"{name}{supervised:,} of {tokens:,} tokens supervised ({supervised / tokens:.1%})" in shown


def test_show_colours_and_bounds_on_a_terminal(
    tiny_conversations: Path,
    tiny_target_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run_main(monkeypatch, "show", str(tiny_conversations), "--row", "1", "--target", str(tiny_target_dir)) == 0
    shown = capsys.readouterr().out
    rendered = render(tiny_tokenizer, read_conversations(tiny_conversations)[0], [tiny_tokenizer.eos_token_id])
    # 30;102m and 30;42m are black on the two greens; a piece of several lines is closed and opened at each.
    green = re.findall(r"\x1b\[30;(?:102|42)m(.*?)\x1b\[0m", shown)
    assert green == [piece for piece, learnt in pieces(rendered) if learnt]


def test_show_writes_a_page_of_every_sequence(
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = FORMATS["Qwen 3, thinking"]
    tokenizer = tokenizer_of(chat, tiny_tokenizer)
    target = save_tiny_target(tmp_path / "target", tokenizer)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": stops_of(chat, tokenizer)}))
    think = {"role": "assistant", "reasoning_content": "hm", "content": "the cat"}
    messages = [{"role": "user", "content": "who"}, think] * 2
    odd = [messages[0], think | {"reasoning_content": None, "content": "a", "tool_calls": [{"name": "f"}]}, think]
    file = write_conversations(tmp_path / "some.jsonl", [{"id": "two", "messages": messages}, {"messages": odd}])
    out = tmp_path / "page.html"
    given = ["show", str(file), "--row", "1", "--target", str(target), "--html", str(out)]
    assert run_main(monkeypatch, *given) == 0
    said = capsys.readouterr().out
    sequences = render_all(tokenizer, read_conversations(file)[0], stops_of(chat, tokenizer))
    supervised = sum(turn > 0 for each in sequences for turn in each.turn)
    assert f"two: {supervised} of {sum(len(each.ids) for each in sequences)} tokens supervised" in said
    assert "2 sequences: the chat template rewrites earlier turns" in said
    shown = Spans(out.read_text(encoding="utf-8"))
    assert html.unescape(shown.rest).count("two#2") == 1
    assert sum(box[0] for box in shown.boxes) == supervised
    assert f"{out}: written" in said


def test_show_counts_what_cannot_be_rendered(
    tmp_path: Path,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = {"id": "good", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = {"id": "bad", "messages": [good["messages"][0], {"role": "assistant", "content": "b", "thinking": "hm"}]}
    file = write_conversations(tmp_path / "some.jsonl", [good, bad])
    given = ["show", str(file), "--target", str(tiny_target_dir)]
    assert run_main(monkeypatch, *given, "--row", "1") == 0
    assert "1 more cannot be rendered, first: conversation 'bad', message 2: the chat" in capsys.readouterr().out
    assert run_main(monkeypatch, *given, "--row", "2") == 2
    assert "conversation 'bad', message 2: the chat template leaves out the reasoning" in capsys.readouterr().err


def test_show_refuses_in_one_line_and_writes_nothing(
    tmp_path: Path,
    tiny_conversations: Path,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, target = str(tiny_conversations), ["--target", str(tiny_target_dir)]
    for arguments, says in (
        (["show", file, "--row", "99", *target], "--row 99: it has rows 1 to 24"),
        (["show", file, "--row", "0", *target], "--row 0: it has rows 1 to 24"),
        (["show", str(tmp_path / "none.jsonl"), "--row", "1", *target], "no such file"),
        (["show", file, "--row", "1", "--html", str(tmp_path / "no" / "p.html"), *target], "in a folder that exists"),
        (["show", file, "--row", "1", "--html", str(tmp_path), *target], "no file can be made there"),
        (["show", file, "--row", "1", "--target", str(tmp_path)], "no config.json there"),
        (["show", file], "row"),
        (["show", file, "--raw", "1"], "raw"),
        ([], "--help"),
    ):
        assert run_main(monkeypatch, *arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert says in said
    assert list(tmp_path.iterdir()) == []
