"""A target in a GGUF file: read by transformers' own reader, once, into an ordinary folder of safetensors.

The weights come out as what llama.cpp computes with: each quantised value expanded to float32. In the folder they are a target
like any other, with a fingerprint, ends and a tokenizer. The tokenizer is the one that lies beside the file (tokenizer.json,
tokenizer_config.json of the original model) where there is one: transformers' reader makes one of the file alone, but leaves out
how some models split text before it is cut into tokens.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from heads.errors import HeadwayError, sha256_file
from heads.folders import cache_folder

SUFFIX = ".gguf"
CONVERSION = 1  # raised whenever `convert` writes something else than before


def gguf_folder(path: Path) -> Path:
    """The folder of a GGUF file's model, converted at first use; 4 bytes a parameter. Raises HeadwayError for a bad file."""
    if not path.is_file():
        raise HeadwayError(f"{path}: there is no such file; give a GGUF file, a folder, or a Hub id")
    folder = cache_folder() / f"{path.stem}-{sha256_file(path)[:16]}-{CONVERSION}"
    if not folder.is_dir():
        print(f"converting {path.name} to {folder} (once)", flush=True)
        beside = (path.parent / "tokenizer.json").is_file()
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **({} if beside else {"gguf_file": path.name}))
            model = read_model(path)
        except (ValueError, KeyError, NotImplementedError, OSError, UnicodeDecodeError) as error:
            raise HeadwayError(
                f"{path}: transformers cannot read it ({error}); download it again, or give the model's folder of safetensors"
            ) from error
        write_folder(folder, model, tokenizer)
    return folder


def read_model(path: Path) -> Any:
    """The file's causal LM in float32, with nothing left that says it was quantised: it can be saved."""
    quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    # A model read from GGUF counts as quantised and refuses to be saved: its tensors go into a fresh one.
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    return model


def write_folder(folder: Path, model: Any, tokenizer: Any) -> None:
    """Save both into `folder`, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        with contextlib.suppress(OSError):  # another process was faster: its folder is there and not empty
            os.rename(new, folder)
