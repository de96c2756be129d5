"""The clinic of the doctor's tests, and the doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.eval.clinic import Clinic, Diagnosis, Examine, examine, open_clinic, train


@pytest.fixture(scope="session")
def ward(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Clinic:
    """The clinic before any head is in it."""
    return open_clinic(tmp_path_factory.mktemp("clinic"), tiny_tokenizer)


@pytest.fixture(scope="session")
def clinic(ward: Clinic) -> Callable[[str], Clinic]:
    """`clinic(kind)`: the clinic with a sound head of that kind, trained when it is first asked for."""

    def with_head(kind: str) -> Clinic:
        if kind not in ward.heads:
            ward.heads[kind] = train(ward, kind)
        return ward

    return with_head


@pytest.fixture
def diagnose(ward: Clinic, capsys: pytest.CaptureFixture[str]) -> Examine:
    """`diagnose(folder, **options)`: what the doctor says of a head."""

    def run(head: Path, **options: Any) -> Diagnosis:
        return examine(capsys, ward, head, **options)

    return run
