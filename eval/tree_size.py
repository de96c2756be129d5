"""How many nodes a candidate tree should have on this device: tau, from a replay, over what a round costs, from decoding.

Greedy and at batch 1. More nodes accept more and cost more: sizes are tried from small to large until they get slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from eval.contenders import BASELINE, Contender, build, static_tree
from eval.decode import Settings
from eval.metrics import costs
from eval.progress import Steps
from eval.protocol import Plan, run
from eval.tree import TreeShape
from heads.eagle import EagleHead
from heads.errors import HeadwayError
from heads.medusa import MedusaHead
from heads.target import Target

SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes beside the root
PROMPTS, TOKENS = 3, 32  # decoded with each size
PATIENCE = 2  # sizes in a row that are slower than the best one end the search
TREE = "tree"


@dataclass(frozen=True)
class Tried:
    """A tree of `size` nodes: the drafts it accepts a round, and a round's cost in target steps."""

    size: int
    accepted: float
    round_cost: float

    @property
    def speedup(self) -> float:
        """Decode speedup to expect."""
        return (1 + self.accepted) / self.round_cost

    def __str__(self) -> str:
        return (
            f"{self.size} nodes, {self.accepted:.3f} drafts accepted a round of {self.round_cost:.2f} target steps, "
            f"about {self.speedup:.2f}x"
        )


def round_cost(
    head: MedusaHead | EagleHead, target: Target, shape: TreeShape, prompts: Sequence[Sequence[int]]
) -> float:
    """A round's cost with this tree in target steps: prompts decoded with it and without a draft, in turn.

    Raises HeadwayError when the target answers nothing.
    """
    contenders = [build(BASELINE, target, None), Contender(TREE, static_tree(head, target, shape, None), None)]
    plan = Plan([list(ids) for ids in prompts], [], Settings(TOKENS), repeats=1)
    with Steps(plan.work(len(contenders)), Console(quiet=True)) as steps:
        ledgers = run(target, contenders, plan, steps).ledgers
    cost = costs(ledgers[TREE], ledgers[BASELINE])
    if cost is None:
        raise HeadwayError("tree: the held-out prompts are answered with nothing, so no size can be tried; give --size")
    return cost.total


def try_sizes(
    shapes: Iterable[TreeShape], accepted: Callable[[int], float], cost: Callable[[TreeShape], float]
) -> Iterator[Tried]:
    """Each tree, from small to large, until PATIENCE in a row are slower than the best or a tree is no larger than the last.

    `accepted`: by the number of nodes.
    """
    best, slower, size = 0.0, 0, 0
    for shape in shapes:
        if slower == PATIENCE or len(shape.paths) == size:
            return
        size = len(shape.paths)
        tried = Tried(size, accepted(size), cost(shape))
        yield tried
        slower = slower + 1 if tried.speedup < best else 0
        best = max(best, tried.speedup)
