"""A causal LM without its layers: its own output function applied to states that are handed in.

Shapes: B rows, T positions, H hidden.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from heads.errors import HeadwayError


def find_decoder(model: Any) -> nn.Module:
    """The module that holds a causal LM's layers and its final norm. Raises HeadwayError where there is none."""
    found = model.get_decoder()
    if found is model:  # what transformers answers when it does not know
        found = getattr(model, "model", None)
    if not isinstance(found, nn.Module):
        raise HeadwayError(f"{type(model).__name__}: its decoder was not found; this architecture is not supported")
    return found


class _Given(BaseModelOutputWithPast):
    """A decoder's output: the given states, and None for whatever else a causal LM passes on."""

    def __getattr__(self, name: str) -> None:
        return None


class GivenStates(nn.Module):
    """Stands where a causal LM keeps its decoder and answers with `last` [B, T, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _Given:
        return _Given(last_hidden_state=self.last)


def output_shell(model: Any, given: GivenStates) -> Any:
    """A copy of `model` that shares every weight and has `given` in the place of its decoder."""
    decoder = find_decoder(model)
    *parents, name = next(path for path, module in model.named_modules() if module is decoder).split(".")
    shell = at = _shallow(model)
    for parent in parents:
        at._modules[parent] = _shallow(at._modules[parent])
        at = at._modules[parent]
    at._modules[name] = given
    return shell


def _shallow(module: nn.Module) -> Any:
    copied = copy.copy(module)
    copied.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    return copied
