"""JSON of unknown origin, read so that no value means something else than was written, or is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from reprlib import repr as short
from typing import Any

MAX_DEPTH = 64  # of objects and lists in each other: deeper ones overflow the stack of what prints them


def loads(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError (JSONDecodeError with the place, for malformed text) or RecursionError: also for NaN and Infinity,
    which are no JSON, and for a field given twice in an object, of which readers keep one or the other.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)


def check_values(value: Any) -> None:
    """Raise ValueError for what JSON can hold and a chat template could not print as it was meant: numbers that are not
    finite, half surrogate pairs, objects nested more than MAX_DEPTH deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        for each in level:
            if isinstance(each, float) and not math.isfinite(each):
                raise ValueError("a number that is not finite")
            if isinstance(each, str):
                _check_characters(each)
        inside = [[*each, *each.values()] if isinstance(each, dict) else each for each in level]
        level = [each for values in inside if isinstance(values, list) for each in values]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair, which is no character") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"field {short(twice)} is given twice")
    return fields


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
