"""Local paths kept out of what is published: each becomes a name that says something elsewhere.

A path may stand in a file as it is, escaped for HTML, JSON, JSON within HTML, the scripts of plotly, or Markdown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

TEXTS = (".json", ".md", ".html")


def _json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _plotly(text: str) -> str:
    return _json(text).replace("/", r"\u002f").replace("<", r"\u003c").replace(">", r"\u003e")


def _json_unicode(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_in_html(text: str) -> str:
    return escape(_json(text))


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


WRITINGS: tuple[Callable[[str], str], ...] = (
    str,
    escape,
    _json,
    _json_unicode,
    _json_in_html,
    _plotly,
    markdown_text,
)


def paths_in(value: Any) -> Iterator[str]:
    """All absolute paths that are strings of a JSON value, or stand in them behind the colon of `NAME:FOLDER`; keys too."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from paths_in(key)
            yield from paths_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from paths_in(each)
    elif isinstance(value, str):
        path = value if value.startswith("/") else value[value.find(":/") + 1 :] if ":/" in value else ""
        if path.strip("/") and not path.startswith("//"):  # no address such as https://
            yield path


def named_after(paths: Iterator[str]) -> dict[str, str]:
    """Each path -> its last part."""
    return {path: path.rstrip("/").rpartition("/")[2] for path in paths}


def replace_paths(folder: Path, names: Mapping[str, str]) -> None:
    """Rewrite all JSON, Markdown and HTML files under `folder` with `names` (path -> what stands for it), longest first."""
    pairs = {
        write(path): write(names[path]) for path in sorted(names, key=len, reverse=True) for write in reversed(WRITINGS)
    }
    patterns = [(re.compile(re.escape(old) + r"(?![\w.-])"), new) for old, new in pairs.items()]
    for file in sorted(folder.rglob("*")):
        if file.suffix in TEXTS and file.is_file():
            text = before = file.read_text(encoding="utf-8")
            for pattern, new in patterns:
                text = pattern.sub(new.replace("\\", r"\\"), text)
            if text != before:
                file.write_text(text, encoding="utf-8")
