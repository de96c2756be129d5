"""The embedded target as it was converted: what its tokenizer makes of text, and what a changed file does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from heads.embedded import CONVERSION, EMBEDDED, embedded_folder
from heads.errors import HeadwayError
from heads.folders import cache_folder


def test_digits_are_tokens_of_their_own_and_breaks_stay_whole() -> None:
    """As the target writes numbered lists: a paragraph break is one token, also before a digit."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("steps:\n\n1. mix 250 g")["input_ids"])
    assert tokens == ["steps", ":", "ĊĊ", "1", ".", "Ġmix", "Ġ", "2", "5", "0", "Ġg"]


def test_a_changed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded_folder()
    name = f"{EMBEDDED}-{CONVERSION}"
    (tmp_path / name).mkdir()
    for path in (cache_folder() / name).iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / name / path.name).symlink_to(path)
        else:
            shutil.copy(path, tmp_path / name / path.name)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    assert embedded_folder() == tmp_path / name
    (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(HeadwayError, match=r"config\.json: missing or not the file that was converted"):
        embedded_folder()
