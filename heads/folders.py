"""Where Headway keeps what it makes once for every project on a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Converted targets, compiled kernels, engines: $HEADWAY_CACHE, else headway/ under $XDG_CACHE_HOME or ~/.cache."""
    if "HEADWAY_CACHE" in os.environ:
        return Path(os.environ["HEADWAY_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headway"
