"""Targets of public models on the meta device, from the shapes that their model cards state; heads as the recipes make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from heads.eagle3 import Eagle3Config, Eagle3Head
from train.eagle import EagleRecipe, head_shape

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def text_config(name: str) -> Any:
    return AutoConfig.for_model(**json.loads((CONFIGS / f"{name}.json").read_text())).get_text_config()


def meta_target(name: str) -> Any:
    """The whole causal LM without any memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(text_config(name))


def meta_head(recipe: EagleRecipe, name: str) -> Eagle3Head:
    """The head that `recipe` trains, with what is frozen in it."""
    shape = head_shape(recipe.head, text_config(name), recipe.target)
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config(**shape, draft_vocab_size=recipe.head.draft_vocab_size))
    head.lm_head.weight.requires_grad_(recipe.head.train_output)
    return head


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
