"""What a run that trains an EAGLE head takes on each GPU, by part, worked out on paper from the shapes of head and target.

Head and target may lie on the meta device: nothing is loaded. The parts that hold parameters are exact; activations are what the
head's backward needs when every row is served on every step, so real text, half of which is prompts, takes less; the pass of the
target is its widest moment. What is left out: the CUDA context and libraries (about 1 GB), and what the allocator loses.

Shapes: X tokens of a forward pass of the head, S steps, H hidden, I width of the MLP, A attention heads, G key-value heads,
E head size, D draft vocabulary. All figures are bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import nn

from heads.draft_layer import LayerConfig
from heads.eagle import EagleHead
from heads.errors import HeadwayError
from train.recipe import Recipe

REDUCE_BUCKET = 5 * 10**8  # parameters; DeepSpeed's reduce_bucket_size, of which overlap_comm keeps two
ADAMW_STATES = 2  # fp32 values that it keeps of each parameter
LOGITS_BUFFER = 2**24 * (
    2 + 4 + 4
)  # of a chunk, in bf16 and twice in float32 (data_prep/target_states.py, heads/losses.py)


@dataclass(frozen=True)
class Sharding:
    """What DeepSpeed does with a head: `stage` of ZeRO (0 = none of it), over `processes`; `narrow`: weights and gradients in
    bf16 beside fp32 ones for the optimizer; which parts lie in host memory."""

    stage: int = 0
    processes: int = 1
    narrow: bool = False
    optimizer_on_host: bool = False
    weights_on_host: bool = False

    @classmethod
    def of(cls, accelerator: Accelerator) -> Sharding:
        """That of a run."""
        plugin = accelerator.state.deepspeed_plugin
        if plugin is None:
            return cls(processes=accelerator.num_processes)
        zero = plugin.deepspeed_config["zero_optimization"]
        on_host = {
            part: zero.get(f"offload_{part}", {}).get("device", "none") != "none" for part in ("optimizer", "param")
        }
        narrow = accelerator.mixed_precision == "bf16"
        return cls(zero["stage"], accelerator.num_processes, narrow, on_host["optimizer"], on_host["param"])


def head_memory(trained: int, frozen: int, states: int, sharding: Sharding) -> dict[str, int]:
    """Bytes of each process for a head of so many parameters, by part; `states`: fp32 values that the optimizer keeps of each.

    Where parts are in host memory, what remains of them on the device for a moment is not counted.
    """
    width = 2 if sharding.narrow else 4

    def share(size: int, from_stage: int) -> int:
        return -(-size // sharding.processes) if sharding.stage >= from_stage else size

    weights = share((trained + frozen) * width, 3)
    gradients = share(trained * width, 2)
    optimizer = share(trained * 4 * (states + sharding.narrow), 1)
    host = weights * sharding.weights_on_host + optimizer * sharding.optimizer_on_host
    return {
        "weights": 0 if sharding.weights_on_host else weights,
        "gradients": gradients,
        "optimizer": 0 if sharding.optimizer_on_host else optimizer,
        "host memory": host,
    }


@dataclass(frozen=True)
class Launch:
    """How a run is spread. `zero`: stage of DeepSpeed ZeRO, 1 to 3, in bf16; 0 is plain data parallelism with float32 weights.

    `target_bits`: of a weight of the target, 16 in bf16, 8 in FP8.
    """

    processes: int = 8
    zero: int = 2
    target_bits: float = 16


def gpu_memory(head: EagleHead, steps: int, target: nn.Module, recipe: Recipe, launch: Launch) -> dict[str, int]:
    """Part -> bytes on one GPU; `head`: with `requires_grad` as it is trained; `target`: the whole causal LM.

    Raises HeadwayError for a stage that there is not.
    """
    online = recipe.data.conversations is not None
    passes = launch.processes * recipe.optim.accumulation
    tokens = max(
        recipe.optim.batch_tokens // passes, recipe.data.max_length
    )  # a long conversation is one process's alone
    return {
        "target": target_bytes(target, recipe, launch) if online else 0,
        "ends of the target": ends_bytes(target),
        **trainer_bytes(head, launch),
        "gradients of the output": _output_gradients(head, steps),
        "activations": activations(head.config, len(head.taps) or 1, steps, tokens, 2 if launch.zero else 4),
        "pass of the target": _target_pass(target, len(head.taps), recipe, launch) if online else 0,
    }


def describe(parts: dict[str, int]) -> list[str]:
    """A line for each part, and one for the sum."""
    return [f"{name:<24} {size / 1e9:6.1f} GB" for name, size in {**parts, "sum": sum(parts.values())}.items()]


def trainer_bytes(head: nn.Module, launch: Launch) -> dict[str, int]:
    """Weights, gradients and optimizer (AdamW) of the head: in bf16 with float32 copies under ZeRO, else in float32."""
    whole = sum(parameter.numel() for parameter in head.parameters())
    trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    if launch.zero not in (0, 1, 2, 3):
        raise HeadwayError(f"ZeRO stage {launch.zero}: there are 1, 2 and 3, and 0 for none")
    sharding = Sharding(launch.zero, launch.processes, narrow=launch.zero > 0)
    parts = head_memory(trained, whole - trained, ADAMW_STATES, sharding)
    # gradients lie in the buckets of a reduction too: DDP's hold all of them
    buckets = 2 * 2 * min(REDUCE_BUCKET, trained) if launch.zero else 4 * trained
    return {
        "head": parts["weights"],
        "gradients": parts["gradients"] + buckets,
        "optimizer": parts["optimizer"],
    }


def target_bytes(target: nn.Module, recipe: Recipe, launch: Launch) -> int:
    """Weights of the target in one process: all of them, or its part of those that the model's tensor-parallel plan splits."""
    every = sum(parameter.numel() for parameter in target.parameters())
    split = split_parameters(target) if recipe.data.online.tensor_parallel else 0
    return int((every - split + split / launch.processes) * launch.target_bits / 8)


def split_parameters(target: Any) -> int:
    """How many parameters transformers' plan for this model splits over the processes."""
    styles = {name: style for name, style in target.tp_plan.items() if not style.startswith("replicated")}
    found = 0
    for name, parameter in target.named_parameters():
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        found += parameter.numel() * (pattern in styles or pattern.rpartition(".")[0] in styles)
    return found


def ends_bytes(target: Any) -> int:
    """Embedding and output in bf16, which every process holds to train with; once where they are one."""
    ends = {
        id(module.weight): module.weight for module in (target.get_input_embeddings(), target.get_output_embeddings())
    }
    return 2 * sum(weight.numel() for weight in ends.values())


def activations(config: LayerConfig, states: int, steps: int, tokens: int, size: int) -> int:
    """What the training forward of an EAGLE-3 head keeps for its backward, at `size` bytes an element; `states` are its taps.

    On every token: fc's input, the norms' inputs, the projections' input, keys and values. On every row of a step: the same for
    its own token (of steps after the first), its queries, what attention returns, the norms' inputs around the MLP, four widths of
    the MLP, the gradient of the state that the loss reads; and its own keys and values of all steps so far.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inside = 2 * queries + 4 * inner
    row = inside + 2 * config.head_dim
    every_token = (states + 4) * hidden + 2 * keys + 2 * config.head_dim
    first = row + 6 * hidden
    later = sum(row + 8 * hidden + 2 * step * keys for step in range(1, steps))
    below = 0  # layers under the last one, on every token; the last one then reads one state where it read two
    if config.num_layers > 1:
        more = sum(inside + 4 * hidden + 2 * max(1, step) * keys for step in range(steps))
        below = (config.num_layers - 1) * more - hidden
    return tokens * size * (every_token + first + later + below)


def _output_gradients(head: EagleHead, steps: int) -> int:
    """In float32, of each step apart, as steps weigh differently (heads/losses.py); none where the output is not trained."""
    output = getattr(head, "lm_head", None)
    return 4 * steps * output.weight.numel() if output is not None and output.weight.requires_grad else 0


def _target_pass(target: Any, taps: int, recipe: Recipe, launch: Launch) -> int:
    """States kept, and a layer at its widest, in bf16; with a mixture of experts every token is there once for each of its experts.

    Attention keeps its mask alone, as flags and as numbers; where a model only has the plain one, three times its scores.
    """
    config, online = target.config.get_text_config(), recipe.data.online
    share = launch.processes if online.tensor_parallel else 1
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    attention = (2 * heads + 2 * config.num_key_value_heads) * size / share
    experts = getattr(config, "num_experts_per_tok", None)
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    mlp = experts * (hidden + 3 * inner / share) if experts else 3 * inner / share
    scores = 3 * recipe.data.max_length * (1 if target._supports_sdpa else 2 * heads / share)
    widest = 2 * ((taps + 4) * hidden + max(attention, mlp))
    return int(max(online.batch_tokens, recipe.data.max_length) * (widest + scores)) + LOGITS_BUFFER
