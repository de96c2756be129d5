"""Versions of what figures and weights depend on."""

from __future__ import annotations

from importlib import metadata


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each; "not installed" also where one is used from source."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
