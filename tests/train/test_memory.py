"""Memory of the shipped recipes: parameters of the real shapes against figures worked out by hand, activations against a count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from heads import linear
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.errors import HeadwayError
from heads.served import served_rows
from heads.shell import find_decoder
from heads.target import _layers
from tests.train.shapes import NAMES, meta_head, meta_target, parameters
from train.eagle import EagleRecipe
from train.memory import Launch, activations, describe, ends_bytes, gpu_memory, split_parameters, trainer_bytes
from train.recipe import read_recipe

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"

# Of the whole target: what the model cards give in billions, summed up from their shapes: 2 V H for the ends, per layer
# H (2 A E + 2 G E) for attention, 3 H I for each MLP, its norms (and biases, sinks and routers), H for the last norm.
TARGETS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}
# Of the head: fc 3 H H, queries 2 H A E, keys and values 4 H G E, output of attention A E H, MLP 3 H I, 4 norms, 32,000 H.
HEADS = {
    "llama-3.1-8b": 424_689_664,
    "llama-3.3-70b": 1_403_027_456,
    "qwen3-8b": 399_523_840,
    "qwen3-32b": 782_520_320,
    "qwen3-30b-a3b": 145_235_968,
    "gpt-oss-20b": 183_225_600,
}
TAPS = {"llama-3.1-8b": (2, 16, 29), "llama-3.3-70b": (2, 40, 77), "qwen3-8b": (2, 18, 33), "qwen3-32b": (2, 32, 61),
        "qwen3-30b-a3b": (2, 24, 45), "gpt-oss-20b": (2, 12, 21)}  # fmt: skip


def shipped(name: str, *arguments: str) -> EagleRecipe:
    path = RECIPES / f"{name}-eagle3.yaml"
    return read_recipe(EagleRecipe, path, [f"--config={path}", *arguments])


@pytest.mark.parametrize("name", NAMES)
def test_target_and_head_have_the_parameters_worked_out_by_hand(name: str):
    recipe, target = shipped(name), meta_target(name)
    head = meta_head(recipe, name)
    assert parameters(target) == TARGETS[name]
    assert parameters(head) == HEADS[name]
    assert head.taps == TAPS[name]
    assert len(_layers(find_decoder(target), target.config.num_hidden_layers)) > max(head.taps)
    states = {tap: torch.empty(1, 5, head.config.hidden_size, device="meta") for tap in head.taps}
    assert head.logits(head.features(states[head.taps[0]], states)).shape == (1, 5, 32000)
    assert head.layers[0].self_attn.q_proj.weight.shape == (
        target.config.num_attention_heads * target.config.head_dim,
        2 * target.config.hidden_size,
    )
    assert head.config.rope_parameters == target.config.rope_parameters


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_states_its_memory_and_its_launch(name: str):
    path = RECIPES / f"{name}-eagle3.yaml"
    text, recipe = path.read_text(), shipped(name)
    parts = gpu_memory(meta_head(recipe, name), recipe.head.steps, meta_target(name), recipe, Launch())
    stated = re.findall(r"^#   (.* GB)$", text, re.MULTILINE)
    assert stated == describe(parts)
    assert sum(parts.values()) < 72e9  # on 80 GB, with room for the context, libraries and what the allocator loses
    command = "accelerate launch --config_file configs/accelerate/zero2.yaml train/eagle.py --config configs/recipes/"
    assert f"#   {command}{path.name}\n" in text
    assert yaml.safe_load((RECIPES.parent / "accelerate" / "zero2.yaml").read_text())["num_processes"] == 8
    assert (recipe.data.features, recipe.precision, recipe.save.confirm) == (None, "bf16", 0)
    if switch := re.search(r"Long context: (--[^;]*);", text.replace("\n# ", " ")):
        words = switch[1].split()
        longer = shipped(name, *(f"{key}={value}" for key, value in zip(words[::2], words[1::2], strict=True)))
        more = gpu_memory(meta_head(longer, name), longer.head.steps, meta_target(name), longer, Launch())
        assert sum(more.values()) < 72e9
        assert f"its activations take {more['activations'] / 1e9:.1f} GB" in text.replace("\n# ", " ")


def test_parts_of_the_70b_recipe_by_hand():
    recipe = shipped("llama-3.3-70b")
    head, target = meta_head(recipe, "llama-3.3-70b"), meta_target("llama-3.3-70b")
    parts = gpu_memory(head, 7, target, recipe, Launch())
    norms = (2 * 80 + 1) * 8192  # all that the plan does not split
    assert split_parameters(target) == TARGETS["llama-3.3-70b"] - norms
    assert parts["target"] == (TARGETS["llama-3.3-70b"] - norms) // 8 * 2 + 2 * norms
    assert parts["ends of the target"] == 2 * 2 * 128256 * 8192
    assert parts["head"] == 2 * 1_403_027_456
    assert parts["gradients"] == 2 * 1_403_027_456 // 8 + 2 * 2 * 500_000_000
    assert parts["optimizer"] == 12 * 1_403_027_456 // 8
    assert parts["gradients of the output"] == 4 * 7 * 32000 * 8192
    # 65,536 tokens over 8 processes and 2 passes; per token in bf16: 7 H + 2 G E + 2 E once, and for each of 7 steps
    # 2 A E + 4 I + 2 E and 8 H (6 H on the first), with 2 G E more each step
    row = 2 * 8192 + 4 * 28672 + 2 * 128
    once = 7 * 8192 + 2 * 1024 + 2 * 128
    assert parts["activations"] == 4096 * 2 * (once + 7 * row + (6 + 6 * 8) * 8192 + (1 + 2 + 3 + 4 + 5 + 6) * 2 * 1024)
    halved = gpu_memory(head, 7, target, recipe, Launch(processes=16))
    assert halved["target"] < 0.51 * parts["target"]
    assert parts["activations"] == halved["activations"]  # a conversation of 4,096 tokens is the least
    assert gpu_memory(head, 7, target, recipe, Launch(target_bits=8))["target"] * 2 == parts["target"]


def test_stages_of_zero_and_a_frozen_output():
    head = Eagle3Head(small(1))
    every = parameters(head)
    assert trainer_bytes(head, Launch(4, 0)) == {"head": 4 * every, "gradients": 8 * every, "optimizer": 8 * every}
    for stage, (weights, gradients) in {1: (2, 2), 2: (2, 0.5), 3: (0.5, 0.5)}.items():
        found = trainer_bytes(head, Launch(4, stage))
        assert found["head"] == pytest.approx(weights * every, abs=1)
        assert found["gradients"] == pytest.approx((gradients + 4) * every, abs=1)  # two buckets of all of them
        assert found["optimizer"] == 3 * every
    with pytest.raises(HeadwayError, match="ZeRO stage 4"):
        trainer_bytes(head, Launch(4, 4))
    head.lm_head.weight.requires_grad_(False)
    assert trainer_bytes(head, Launch(4, 2))["optimizer"] == 3 * (every - 200 * 256)


def test_tied_ends_are_counted_once():
    class Ends:
        def __init__(self, tied: bool) -> None:
            self.first = torch.nn.Embedding(10, 4)
            self.last = torch.nn.Linear(4, 10, bias=False)
            if tied:
                self.last.weight = self.first.weight

        def get_input_embeddings(self) -> Any:
            return self.first

        def get_output_embeddings(self) -> Any:
            return self.last

    assert (ends_bytes(Ends(True)), ends_bytes(Ends(False))) == (80, 160)


def small(layers: int) -> Eagle3Config:
    return Eagle3Config(
        hidden_size=256,
        vocab_size=200,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        num_layers=layers,
        taps=(1, 2, 3),
    )


class OneNorm(torch.autograd.Function):
    """RMSNorm as one operator that keeps its input, as it is on CUDA; on a CPU torch composes it and keeps more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (1, 4), (2, 3)])
def test_activations_are_what_autograd_keeps(layers: int, steps: int, monkeypatch: pytest.MonkeyPatch):
    """One text, all of it the assistant's: every storage that the training forward saves, counted once."""
    monkeypatch.setattr(linear, "rms_norm", OneNorm.apply)
    tokens, head = 400, Eagle3Head(small(layers)).train()
    generator = torch.Generator().manual_seed(0)
    table_VH = torch.randn(200, 256, generator=generator)
    index_P, segment_P = served_rows(torch.ones(tokens, dtype=torch.int64))
    weights = {parameter.untyped_storage().data_ptr() for parameter in head.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = head(
            torch.randint(0, 200, (tokens,), generator=generator),
            torch.tensor([tokens]),
            index_P,
            segment_P,
            torch.randn(tokens, 768, generator=generator),
            torch.randn(len(index_P), 256, generator=generator),
            embed=lambda ids: table_VH[ids],
            output=lambda states: states @ table_VH.T,
            losses={"kl": 1.0},
            steps=steps,
        )
    function: Any = made.numerators_K.grad_fn
    counted = sum(kept.values()) + sum(4 * grad_RH.numel() for grad_RH in function.grad_states)
    assert activations(head.config, 3, steps, tokens, 4) == pytest.approx(counted, rel=0.02)
