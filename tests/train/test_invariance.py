"""Case 2 in one process: the gradient of a step is the same whatever is padded and however its batch is split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_prep.store import FeatureStore, StoredConversation
from tests.train.worker import run_job
from tests.train.workplace import SGD, TRAINERS, Workplace

ONE_STEP = (*SGD, "--optim.max_steps=1", "--optim.batch_tokens=700", "--save.confirm=0")
SPLITS = {f"in {passes} passes": (f"--optim.accumulation={passes}",) for passes in (2, 3, 11)}


def padded(stored: StoredConversation) -> StoredConversation:
    """With up to 9 more tokens behind, which nobody supervises: all that is stored of a token repeats in another order."""
    more = 1 + len(stored.id) % 9

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:more].flip(0)])

    values = {field.name: getattr(stored, field.name) for field in fields(stored)}
    changed = {name: longer(value) for name, value in values.items() if isinstance(value, Tensor)}
    turn_T = torch.cat([stored.turn_T, torch.zeros_like(stored.turn_T[:more])])
    taps = {tap: longer(states) for tap, states in stored.taps.items()}
    return replace(stored, **changed | {"turn_T": turn_T, "taps": taps})


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_gradient_is_the_same(
    trainer: str,
    tmp_path: Path,
    features: Path,
    tapped: Path,
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
):
    place = Workplace(tmp_path, features, tapped, tiny_target_dir)

    def train(name: str, *options: str) -> None:
        run_job(**place.job(trainer, name, *ONE_STEP, *options, record=place.record(name)))

    train("whole")
    for name, options in SPLITS.items():
        train(name, *options)
    read = FeatureStore.__getitem__
    monkeypatch.setattr(FeatureStore, "__getitem__", lambda self, row: padded(read(self, row)))
    train("padded")
    train("padded in 3 passes", *SPLITS["in 3 passes"])
    for name in (*SPLITS, "padded", "padded in 3 passes"):
        error = place.gradient_error("whole", name)
        record_property(name, error)
        print(f"{trainer}, {name}: gradient {error:.1e} apart (relative L2)")
        assert error <= 1e-6, name
