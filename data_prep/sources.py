"""Rows of data sets, one after the other: local JSON lines, JSON and Parquet files, folders and names of the Hub."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep import strict_json
from data_prep.recognise import Misfit
from heads.errors import HeadwayError

FILES = (".jsonl", ".json", ".parquet")


def rows_of(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, row) of a file by its ending, else of what `datasets.load_dataset` finds under `source`: a folder, a Hub
    name, or `NAME:CONFIG`. `split` is of those; a file has none. A line that is no JSON comes as a Misfit.

    Raises HeadwayError for a source that is not there, has no such split, or is broken as a whole.
    """
    path = Path(source).expanduser()
    if path.suffix.lower() not in FILES:
        if path.is_file():
            raise HeadwayError(f"{source}: unknown kind of file; give one that ends in {', '.join(FILES)}")
        name, _, config = (source, "", "") if path.is_dir() else source.partition(":")
        yield from _loaded(source, {"path": name, "name": config or None, "split": split})
        return
    if not path.is_file():
        raise HeadwayError(f"{source}: there is no such file; check the path")
    if path.suffix.lower() == ".parquet":
        yield from _loaded(source, {"path": "parquet", "data_files": str(path), "split": "train"})
    elif _is_one_document(path):
        yield from _document(source, path)
    else:
        yield from _lines(source, path)


def _loaded(source: str, arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Rows from `datasets`, streamed. One schema holds for all of them there, so what a row lacks is null: left out."""
    from datasets import load_dataset  # two seconds, and local JSON does without

    try:
        for number, row in enumerate(load_dataset(**arguments, streaming=True), 1):
            yield f"{source}, row {number}", without_nulls(row)
    except (ValueError, OSError) as error:  # its own errors, pyarrow's and the network's are of these
        raise HeadwayError(
            f"{source}: cannot be read ({error}); give a file, a folder or a Hub name (NAME or NAME:CONFIG), and its "
            "--split"
        ) from error


def without_nulls(value: Any) -> Any:
    """The same without the fields that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _is_one_document(path: Path) -> bool:
    """Whether the file is one JSON array or one object over several lines, instead of a value a line."""
    with path.open("rb") as file:
        for raw in file:
            line = raw.removeprefix(codecs.BOM_UTF8).strip()
            if line:
                return line.startswith(b"[") or line == b"{"
    return False


def _document(source: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        document = strict_json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise HeadwayError(f"{source}: is no JSON ({error}); mend it, or give JSON lines") from error
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(rows, 1):
        yield f"{source}, row {number}", row


def _lines(source: str, path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield f"{source}, line {number}", _parsed(raw)


def _parsed(raw: bytes) -> Any:
    try:
        return strict_json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Misfit("not UTF-8")
    except (ValueError, RecursionError):  # also nested too deep, or a number of too many digits
        return Misfit("malformed JSON")
