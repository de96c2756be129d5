"""Versions as the packages say them themselves."""

from __future__ import annotations

import torch
import transformers

from heads.versions import versions


def test_installed_or_not() -> None:
    found = versions("torch", "transformers", "no-such-package")
    assert found == {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "no-such-package": "not installed",
    }
