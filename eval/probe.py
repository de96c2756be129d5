"""A few nodes decoded through the cache and compared with a plain forward pass, for architectures no test covers.

An architecture may ignore positions, or build a mask of its own, without any error: the text would be wrong and nobody
would know. So a target of an unknown type shows once, on a ragged batch and a small tree, that its states are the ones
of each path alone.

Shapes: B rows, N tree nodes, H hidden.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import torch

from eval.tree import DraftTree, TreeShape
from heads.errors import HeadwayError
from heads.target import States, Target

# The types that tests/eval/test_architectures.py decodes; their states are known to be right.
TESTED = frozenset(
    {"cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "llama4_text",
     "mistral", "mixtral", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"}
)  # fmt: skip
SHAPE = TreeShape.of([(0,), (1,), (0, 0), (1, 0)])
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1])  # any ids; of different lengths
DRAFTS = ([5, 8, 4, 6], [8, 2, 8, 1])

_passed: WeakSet[Target] = WeakSet()


class Passes(Protocol):
    """What the probe needs of eval.passes.TargetPasses."""

    def prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, States]: ...

    def verify(self, tree: DraftTree) -> States: ...


def needs_probe(target: Target) -> bool:
    """Is the target of a type that no test covers, and not probed yet?"""
    return target.config.model_type not in TESTED and target not in _passed


def probe(target: Target, passes: Passes) -> None:
    """Compare the states of a small tree's nodes with those of their paths. `passes`: unused ones, for two rows.

    Raises HeadwayError if the typical node is off by more than rounding explains (the median: in low precision a
    mixture of experts may route single nodes otherwise).
    """
    prompts = [[token % target.vocab_size for token in prompt] for prompt in PROMPTS]
    passes.prefill(prompts)
    roots_B = torch.tensor([prompt[0] for prompt in prompts], device=target.device)
    drafts_BM = torch.tensor(DRAFTS, device=target.device) % target.vocab_size
    tree = DraftTree.static(roots_B, drafts_BM, SHAPE)
    last_BNH = passes.verify(tree).last
    errors = []
    for row, paths in enumerate(tree.paths().tolist()):
        for node, path in enumerate(paths):
            tokens = [int(tree.tokens_BN[row, step]) for step in path if step >= 0]
            alone_H = target.states(torch.tensor([[*prompts[row], *tokens]], device=target.device)).last[0, -1]
            errors.append(float((last_BNH[row, node] - alone_H).float().norm() / alone_H.float().norm()))
    error = sorted(errors)[len(errors) // 2]
    allowed = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.1
    if not error <= allowed:
        raise HeadwayError(
            f"target '{target.name}' ({target.config.model_type}): states of a drafted tree differ from a plain pass by "
            f"{error:.2g} (relative), so drafts cannot be verified; this architecture is not supported"
        )
    _passed.add(target)
