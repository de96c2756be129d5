"""A conversation as it is learnt: every token's bounds, the supervised ones coloured, and their share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.text import Text

from data_prep.conversations import Conversation, read_conversations
from data_prep.plan import Source, describe
from data_prep.render import Rendered, render_all
from heads.errors import HeadwayError, atomic_write_text

# Neighbouring tokens differ in shade, so that bounds are seen.
SHADES = {True: ("black on bright_green", "black on green"), False: ("default", "default on grey23")}
# What would steer a terminal is shown as its picture.
CONTROL, DELETE = [*range(9), *range(11, 32)], range(127, 160)
PICTURES = {code: 0x2400 + code for code in CONTROL} | dict.fromkeys(DELETE, 0x2421)
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.7 system-ui, sans-serif; margin: 2em auto; max-width: 60em; color: #1a1a1a; background: #fff }}
pre {{ font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }}
pre span {{ border: 1px solid #ccc; border-radius: 3px; color: #666 }}
pre span.learnt {{ border-color: #2a7d46; background: #c9f2d5; color: #08361a }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Share:
    """Supervised tokens out of all."""

    supervised: int = 0
    tokens: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(self.supervised + other.supervised, self.tokens + other.tokens)

    def __str__(self) -> str:
        share = self.supervised / self.tokens if self.tokens else 0
        return f"{self.supervised:,} of {self.tokens:,} tokens supervised ({share:.1%})"


def show(file: Path, row: int, target: str, html: Path | None) -> None:
    """Print conversation number `row` (from 1) of a file, or write it as a page to `html`.

    Raises HeadwayError for a bad file, row or target, a conversation that cannot be rendered, and a page that cannot be
    written. Other conversations of the file that cannot be rendered are counted, the first one's fault is named.
    """
    conversations = read_conversations(file)
    if not 1 <= row <= len(conversations):
        raise HeadwayError(f"{file}: --row {row}: it has rows 1 to {len(conversations)}")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise HeadwayError(f"--html {html}: no file can be made there; give one in a folder that exists")
    source = describe(target, "auto", torch.device("cpu"))
    chosen = conversations[row - 1]
    sequences = render_all(source.tokenizer, chosen, source.stop_ids)
    lines = [f"{chosen.id}: {_share(sequences)}"]
    if len(sequences) > 1:
        lines.append(f"{len(sequences)} sequences: the chat template rewrites earlier turns")
    lines += _of_set(file, conversations, source)
    if html is None:
        _print(sequences, lines)
    else:
        atomic_write_text(html, page(f"{file.name}, row {row}", sequences, lines))
        print("\n".join([*lines, f"{html}: written"]))


def _share(sequences: Sequence[Rendered]) -> Share:
    return sum((Share(sum(map(bool, each.turn)), len(each.ids)) for each in sequences), Share())


def _of_set(file: Path, conversations: Sequence[Conversation], source: Source) -> Iterator[str]:
    """Lines on the whole file."""
    total, faults = Share(), []
    console = Console(stderr=True)
    for each in track(conversations, f"{file.name}", console=console, transient=True, disable=not console.is_terminal):
        try:
            total += _share(render_all(source.tokenizer, each, source.stop_ids))
        except HeadwayError as error:
            faults.append(str(error))
    yield f"{file}, {len(conversations) - len(faults):,} conversations: {total}"
    if faults:
        yield f"{len(faults):,} more cannot be rendered, first: {faults[0]}"


def pieces(rendered: Rendered) -> Iterator[tuple[str, bool]]:
    """Each token's text and whether it is supervised; of several tokens in one character, the first has it."""
    before = 0
    for (start, end), turn in zip(rendered.extents, rendered.turn, strict=True):
        yield rendered.text[max(start, before) : end].translate(PICTURES), turn > 0
        before = max(before, end)


def _print(sequences: Sequence[Rendered], lines: Sequence[str]) -> None:
    text = Text()
    for rendered in sequences:
        if len(sequences) > 1:
            text.append(f"{rendered.id}\n", style="bold")
        for number, (piece, learnt) in enumerate(pieces(rendered)):
            text.append(piece, style=SHADES[learnt][number % 2])
        text.append("\n")
    Console().print(text, Text("\n".join(lines)), sep="\n", soft_wrap=True)


def page(title: str, sequences: Sequence[Rendered], lines: Sequence[str]) -> str:
    """A page that stands alone: a box a token, its id and turn where the pointer is."""
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    for rendered in sequences:
        spans = [
            f'<span{" class=learnt" if learnt else ""} title="id {token}{f", turn {turn}" if learnt else ""}">'
            f"{escape(piece).replace(chr(10), '↵' + chr(10))}</span>"
            for token, turn, (piece, learnt) in zip(rendered.ids, rendered.turn, pieces(rendered), strict=True)
        ]
        parts.append(f"<h2>{escape(rendered.id)}</h2>\n<pre>{''.join(spans)}</pre>")
    return PAGE.format(title=escape(title), body="\n".join(parts))
