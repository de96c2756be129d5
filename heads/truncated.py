"""A draft model without training: a target's first layers under its own norm and head, as a transformers folder.

    python heads/truncated.py --target smollm2-135m-instruct --layers 6 --out artifacts/first-6

It drafts as it is (eval/measure.py --head model:DIR), and is where the training of a draft model starts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

from heads.command_line import parse_arguments
from heads.errors import HeadwayError, run_script
from heads.target import DEFAULT_TARGET, resolve


def truncate(target: str, layers: int, out: Path) -> None:
    """Save the first `layers` layers of `target` (a name that `resolve` takes) to `out`, which must be new or empty.

    `out` appears whole or not at all. Raises HeadwayError for an unknown target, a number of layers that is not below
    the target's own, and a folder with something in it.
    """
    folder = resolve(target)
    config = AutoConfig.from_pretrained(folder)
    whole = config.get_text_config().num_hidden_layers
    if not 1 <= layers < whole:
        raise HeadwayError(f"layers {layers}: target '{target}' has {whole}; give a number from 1 to {whole - 1}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadwayError(f"{out}: there is something already; give a new folder")
    _shorten(config.get_text_config(), layers)
    before = get_verbosity()
    set_verbosity_error()  # the layers left out are "unexpected" here
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="auto")
    finally:
        set_verbosity(before)
    out.parent.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    stage = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(stage)
        AutoTokenizer.from_pretrained(folder).save_pretrained(stage)
        if out.is_dir():
            out.rmdir()
        os.replace(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _shorten(config: Any, layers: int) -> None:
    """Cut the layer count and every list that has one entry a layer (`layer_types`, `no_rope_layers`, ...)."""
    whole = config.num_hidden_layers
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def main() -> None:
    """Parse the command line and write the folder."""
    parser = ArgumentParser(description="Make a draft model of a target's first layers.", exit_on_error=False)
    parser.add_argument("--target", default=DEFAULT_TARGET, help="embedded name, local folder or Hub id")
    parser.add_argument("--layers", type=int, required=True, help="layers to keep, counted from the input")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, new or empty")
    options = parse_arguments(parser)
    truncate(options.target, options.layers, options.out)
    print(f"{options.out}: the first {options.layers} layers of '{options.target}', for --head model:{options.out}")


if __name__ == "__main__":
    run_script(main)
