"""Heads between layouts: ours, those of vLLM, SGLang and speculators, EAGLE's, Medusa's. The layout that comes in is found out.

    python heads/convert.py --head artifacts/eagle3 --to vllm --out exports/vllm           # what to serve with, and how
    python heads/convert.py --head downloaded --target DIR_OR_HUB_ID --to headway --out heads/theirs   # measure, go on training

Every name, shape and value is checked on the way in and on the way out; what a layout cannot carry is refused.
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

import heads  # noqa: F401 - registers the kinds of heads
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, run_script
from heads.formats.files import DTYPES
from heads.formats.layouts import WRITTEN, export_head, read_head, save_headway
from heads.formats.recognise import HEADWAY
from heads.formats.serving import SERVING


def main() -> None:
    """Parse the command line and convert."""
    parser = ArgumentParser(
        description="Convert a head to the layout of an engine, or any layout to ours.", exit_on_error=False
    )
    parser.add_argument("--head", type=Path, required=True, help="folder of a head in any layout")
    parser.add_argument(
        "--target", help="embedded name, local folder or Hub id; null: the one the head's manifest names"
    )
    parser.add_argument("--to", choices=[*WRITTEN, HEADWAY], required=True, help="who is to read it")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, new or empty")
    parser.add_argument(
        "--dtype", choices=["auto", *DTYPES], default="auto", help="of the weights; auto keeps the head's"
    )
    parser.add_argument("--draft_tokens", type=int, help="tokens drafted a round; null: 4, and all heads of Medusa")
    parser.add_argument(
        "--taps", help="EAGLE-3: layers whose input is read, such as 2,16,29, where the config is wrong"
    )
    options = parse_arguments(parser)
    found = read_head(options.head, options.target, _taps(options.taps))
    notes = list(found.notes)
    print(f"{options.head}: {found.layout} layout, kind {found.head.config.kind}, target '{found.target.name}'")
    if options.to == HEADWAY:
        save_headway(found, options.out, options.dtype)
        commands: list[str] = [f"python eval/measure.py --target {found.target.name} --head {options.out} --out REPORT"]
    else:
        written = export_head(found.head, found.target, options.to, options.out, options.dtype, options.draft_tokens)
        notes += [note for note in written.notes if note not in notes]
        commands = [command.line for command in written.commands]
    for note in notes:
        print(f"note: {note}")
    print(f"{options.out}: written{'' if options.to == HEADWAY else f'; {SERVING} says how to serve it'}")
    for line in commands:
        print(f"  {line}")


def _taps(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise HeadwayError(f"--taps {text}: give layer numbers separated by commas, such as 2,16,29") from error


if __name__ == "__main__":
    run_script(main)
