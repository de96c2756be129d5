"""The typed configuration of a training run: one schema for command line, YAML files and provenance.

A script reads it with `read_recipe`: `--config FILE.yaml`, then dotted overrides (`--optim.lr 1e-3`); unknown keys are refused;
`--print_config` shows the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

from heads.errors import HeadwayError

# What may differ between a run and its continuation: nothing that the weights of a run that ends depend on.
FREE_KEYS = ("log", "optim.spike")


@dataclass
class Online:
    """How the target computes the states while the head is trained, where `data.conversations` takes the place of a store.

    Args:
        dtype: of the target and of its states; auto is bfloat16 where the device is fast at it, else float32.
        batch_tokens: tokens of one pass of the target, padding included.
        tensor_parallel: whether the target is split over all processes; else each of them holds the whole of it.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    batch_tokens: int = 8192
    tensor_parallel: bool = False


@dataclass
class Data:
    """What is trained on: a store of the target's states, or conversations over which the target runs during training.

    Args:
        features: folder of a feature store (data_prep/collect.py makes it); null where conversations are given.
        conversations: JSON lines file of conversations; null where features are given.
        held_out: conversations kept for validation: those whose ids have the smallest SHA-256.
        max_length: longer conversations are cut to this many tokens, and that is said; a store has its own.
        online: how the target runs over the conversations; a store has its own.
    """

    features: str | None = None
    conversations: str | None = None
    held_out: int = 64
    max_length: int = 2048
    online: Online = field(default_factory=Online)


@dataclass
class Optim:
    """The optimizer, with a cosine schedule.

    Args:
        name: adamw, or sgd without momentum, whose steps are the gradient itself.
        lr: peak learning rate.
        betas: the two decay rates of AdamW.
        weight_decay: decoupled weight decay.
        warmup: share of the steps over which the learning rate rises from 0.
        clip: largest norm of the gradient, of all parameters on all processes together.
        spike: stop before a batch that takes a step's loss above this multiple of the running median; null = never.
        epochs: passes over the training conversations.
        max_steps: stop (and end the schedule) after so many steps; null = all epochs.
        batch_tokens: tokens of one optimizer step, all processes together; a longer conversation makes a step of its own.
        accumulation: forward passes per process that one step is divided into; changes memory, not the result.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.1
    clip: float = 1.0
    spike: float | None = 10.0
    epochs: int = 2
    max_steps: int | None = None
    batch_tokens: int = 16384
    accumulation: int = 1


@dataclass
class Save:
    """Checkpoints and validation.

    Args:
        every: steps between two checkpoints; each is validated first, and the one with the best replayed tau becomes the result.
        keep_last: checkpoints kept beside the best.
        confirm: held-out prompts that are decoded with the best head at the end; null = 4 where the target's weights take less
            than 1 GiB, else none.
    """

    every: int = 100
    keep_last: int = 2
    confirm: int | None = None


@dataclass
class Log:
    """Where the figures go, beside the console and metrics.jsonl.

    Args:
        wandb: auto = online with a key, offline without.
        project: wandb's project.
    """

    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    project: str = "headway"


@dataclass
class Recipe:
    """What every trainer has in common; a trainer adds its `head`.

    Args:
        target: the embedded target's name, a folder, or a Hub id.
        out: folder of the finished head; the run keeps its checkpoints there too.
        seed: of the order of the data and of every random number.
        precision: auto = bf16 where the device is faster with it.
        dry_run: only say what the run would take: parameters, memory, steps, time; write nothing.
        pilot: only train on growing shares of the data for about so many minutes, and predict the tau of all of it; write nothing.
    """

    target: str = "smollm2-135m-instruct"
    out: str = "artifacts/head"
    seed: int = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    save: Save = field(default_factory=Save)
    log: Log = field(default_factory=Log)
    dry_run: bool = False
    pilot: float | None = None

    def check(self) -> None:
        """Raise HeadwayError naming the key for a value that cannot be."""
        optim = self.optim
        require("optim.lr", optim.lr, 0 < optim.lr < math.inf, "above 0, such as 1e-3")
        for beta in optim.betas:
            require("optim.betas", beta, 0 <= beta < 1, "from 0 to below 1, such as 0.9")
        require("optim.weight_decay", optim.weight_decay, 0 <= optim.weight_decay < math.inf, "0 or above")
        require("optim.warmup", optim.warmup, 0 <= optim.warmup < 1, "a share from 0 to below 1, such as 0.1")
        require("optim.clip", optim.clip, 0 < optim.clip < math.inf, "above 0, such as 1.0")
        require("optim.spike", optim.spike, optim.spike is None or optim.spike > 1, "above 1, such as 10.0, or null")
        for name in ("epochs", "batch_tokens", "accumulation"):
            value = getattr(optim, name)
            require(f"optim.{name}", value, value >= 1, "at least 1")
        require(
            "optim.max_steps", optim.max_steps, optim.max_steps is None or optim.max_steps >= 1, "at least 1, or null"
        )
        require(
            "data.held_out",
            self.data.held_out,
            self.data.held_out >= 1,
            "at least 1: the best checkpoint is chosen on it",
        )
        require("pilot", self.pilot, self.pilot is None or 0 < self.pilot < math.inf, "minutes above 0, such as 10")
        require("save.every", self.save.every, self.save.every >= 1, "at least 1")
        self._check_data()
        confirm = self.save.confirm
        require("save.confirm", confirm, confirm is None or confirm >= 0, "0 or above, or null")
        require("save.keep_last", self.save.keep_last, self.save.keep_last >= 1, "at least 1")
        require("seed", self.seed, 0 <= self.seed < 2**63, "between 0 and 2^63")

    def _check_data(self) -> None:
        data = self.data
        if (data.features is None) == (data.conversations is None):
            raise HeadwayError(
                f"recipe: data.features is {data.features}, data.conversations is {data.conversations}; name one of them, "
                "and set the other to null"
            )
        require("data.max_length", data.max_length, data.max_length >= 2, "at least 2")
        require("data.online.batch_tokens", data.online.batch_tokens, data.online.batch_tokens >= 1, "at least 1")
        if data.online.tensor_parallel:
            only_here = "0 with data.online.tensor_parallel, as no process alone has the target to decode with"
            require("save.confirm", self.save.confirm, self.save.confirm == 0, only_here)

    def taps(self) -> tuple[int, ...]:
        """The layers of the target whose inputs the head reads; the last state comes with them."""
        return ()


def require(key: str, value: Any, holds: bool, wanted: str) -> None:
    """Raise HeadwayError naming the key unless `holds`."""
    if not holds:
        raise HeadwayError(f"recipe: {key} is {value}; it must be {wanted}")


def require_head(num_layers: int, decay: float, draft_vocab_size: int | None) -> None:
    """Raise HeadwayError for a value that no method's `head` can have."""
    require("head.num_layers", num_layers, num_layers >= 1, "at least 1")
    require("head.decay", decay, 0 < decay <= 1, "above 0 and at most 1, such as 0.8")
    whole = draft_vocab_size is None or draft_vocab_size >= 1
    require("head.draft_vocab_size", draft_vocab_size, whole, "at least 1, or null for the full vocabulary")


R = TypeVar("R", bound=Recipe)


def read_recipe(recipe_class: type[R], default: Path, arguments: Sequence[str]) -> R:
    """The recipe that `arguments` ask for, checked; without `--config` it is the file `default`.

    Raises HeadwayError for an unknown key, a value of the wrong type or out of range, and a file that cannot be read.
    """
    parser = ArgumentParser(exit_on_error=False, description=recipe_class.__doc__)
    parser.add_argument("--config", action="config", help="recipe file (YAML); later arguments override it")
    parser.add_argument("--dry_run", action="store_true", help="say what the run would take; write nothing")
    parser.add_class_arguments(recipe_class, as_group=False, skip={"dry_run"})
    named = any(argument == "--config" or argument.startswith("--config=") for argument in arguments)
    arguments = arguments if named else [f"--config={default}", *arguments]
    try:
        parsed = parser.parse_args(arguments)
        recipe = parser.instantiate(parsed)
    except ArgumentError as error:
        raise HeadwayError(f"recipe ({' '.join(arguments)}): {error}; see --help and --print_config") from error
    recipe = recipe_class(**{name: getattr(recipe, name) for name in recipe_class.__dataclass_fields__})
    recipe.check()
    return recipe


def differing_key(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str | None:
    """The first dotted key at which two recipes (as dicts) differ, apart from those that may."""
    for key in sorted(old.keys() | new.keys()):
        name = prefix + key
        if name in FREE_KEYS:
            continue
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if deeper := differing_key(a, b, f"{name}."):
                return deeper
        elif a != b:
            return name
    return None


def as_json(recipe: Recipe) -> dict[str, Any]:
    """The run that a recipe describes as plain JSON values (tuples become lists), for manifests and comparison."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return {key: value for key, value in plain.items() if key not in ("dry_run", "pilot")}
