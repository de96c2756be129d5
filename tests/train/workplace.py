"""A folder with recipes of both trainers, jobs over them (tests/train/worker.py), and what became of these.

The steps are plain gradient steps of small batches, so that weights differ by no more than gradients do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from data_prep.store import FeatureStore
from tests.train.conftest import eagle_recipe, medusa_recipe, write_recipe
from tests.train.worker import GRADIENT
from train.sampler import Window, plan, split_rows

TRAINERS = ("medusa", "eagle")
BATCH = 250
SGD = ("--optim.name=sgd", "--optim.lr=0.1", "--optim.warmup=0", "--optim.clip=1e6", "--optim.max_steps=20")
SMALL = (*SGD, f"--optim.batch_tokens={BATCH}", "--optim.epochs=4", "--save.every=20", "--save.confirm=0")


class Workplace:
    """Recipes of both trainers in a folder, jobs over them, and what became of these."""

    def __init__(self, folder: Path, features: Path, tapped: Path, target: Path) -> None:
        self.folder = folder
        write_recipe(folder / "medusa.yaml", medusa_recipe(features, target))
        write_recipe(folder / "eagle.yaml", eagle_recipe(tapped, target))
        self.stores = {"medusa": FeatureStore.open(features), "eagle": FeatureStore.open(tapped)}
        self.training = {
            "medusa": split_rows(self.stores["medusa"], 6)[0],
            "eagle": split_rows(self.stores["eagle"], 5)[0],
        }
        self.masked = {
            trainer: [store.conversation_ids[row] for row in self.training[trainer][::3]]
            for trainer, store in self.stores.items()
        }

    def job(self, trainer: str, name: str, *options: str, **more: Any) -> dict[str, Any]:
        out = f"--out={self.folder / name}"
        return {"trainer": trainer, "arguments": [f"--config={self.folder / trainer}.yaml", out, *options], **more}

    def steps(self, trainer: str, name: str, *options: str, **more: Any) -> dict[str, Any]:
        """20 steps with a third of the conversations masked."""
        return self.job(trainer, name, *options, masked=self.masked[trainer], **more)

    def record(self, name: str) -> str:
        return str(self.folder / f"{name}.safetensors")

    def windows(self, trainer: str) -> list[Window]:
        lengths = self.stores[trainer].lengths
        return plan(self.training[trainer], lengths, batch_tokens=BATCH, epochs=4, max_steps=20, seed=3)

    def write(self, name: str, jobs: list[dict[str, Any]]) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(jobs))
        return str(path)

    def weights(self, name: str) -> Tensor:
        tensors = load_file(self.folder / name / "model.safetensors")
        return torch.cat(
            [tensor.double().flatten() for _, tensor in sorted(tensors.items()) if tensor.is_floating_point()]
        )

    def recorded(self, name: str, prefix: str) -> Tensor:
        tensors = load_file(self.record(name))
        return torch.cat([tensors[key].double().flatten() for key in sorted(tensors) if key.startswith(prefix)])

    def gradient_error(self, expected: str, found: str) -> float:
        """How far two recorded gradients are apart: relative, in L2 over all parameters together."""
        one = self.recorded(expected, GRADIENT)
        return float((self.recorded(found, GRADIENT) - one).norm() / one.norm())

    def weight_error(self, expected: str, found: str) -> float:
        """The same of final weights."""
        one = self.weights(expected)
        return float((self.weights(found) - one).norm() / one.norm())
