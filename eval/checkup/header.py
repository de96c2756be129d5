"""The header of a safetensors file, read byte by byte: it tells what a damaged file holds, where a reader says only that it cannot.

The file: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
LENGTH_BYTES, MOST_HEADER = 8, 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor as a header lists it; `dtype` as torch calls it, `end` its last byte + 1 in the data."""

    dtype: str
    shape: tuple[int, ...]
    end: int = 0


@dataclass(frozen=True)
class Header:
    """`fault`: what is wrong with the file, None where it is whole."""

    entries: dict[str, Entry]
    fault: str | None


def read_header(path: Path) -> Header:
    """Never raises for what the file holds; OSError where it cannot be opened."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or LENGTH_BYTES + length > size or length > MOST_HEADER:
            return Header({}, f"{size:,} bytes are there, its header alone would need {LENGTH_BYTES + length:,}")
        raw = file.read(length)
    try:
        listed = json.loads(raw)
        entries = {name: _entry(item) for name, item in listed.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Header({}, f"its header is not the one of a safetensors file ({' '.join(str(error).split())[:80]})")
    needed = LENGTH_BYTES + length + max((entry.end for entry in entries.values()), default=0)
    if size == needed:
        return Header(entries, None)
    if size > needed:
        return Header(entries, f"{size - needed:,} bytes too many lie behind its tensors")
    cut = sorted(name for name, entry in entries.items() if LENGTH_BYTES + length + entry.end > size)
    return Header(entries, f"{size:,} bytes are there, its tensors need {needed:,}: {some(cut)} cut off")


def _entry(item: dict[str, Any]) -> Entry:
    shape, (begin, end) = tuple(int(size) for size in item["shape"]), item["data_offsets"]
    if not 0 <= int(begin) <= int(end):
        raise ValueError("data_offsets run backwards")
    return Entry(DTYPES.get(item["dtype"], str(item["dtype"])), shape, int(end))


def some(names: list[str], most: int = 3) -> str:
    """`a`, `b`, `c` and 4 more."""
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
