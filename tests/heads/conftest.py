"""A target with layers enough for three taps that are apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from heads.formats.layout import TargetFacts
from tests.conftest import save_tiny_target
from tests.heads.foreign import LAYERS


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target-8"), tiny_tokenizer, num_hidden_layers=LAYERS)


@pytest.fixture(scope="session")
def target(target_dir: Path) -> TargetFacts:
    return TargetFacts.load(str(target_dir))
