"""The proof: every outcome of drafting and verification, with its exact probability, through the shipped functions.

A case is a target and a draft whose laws depend on the whole prefix, given as tables. `ForkingChooser` follows a
script of outcomes and then the likeliest one, noting what else could have come; each alternative becomes a script of its
own until none is left. Scripts and cases are rows of one batch, so the vectorised code itself is what is enumerated.
A round's emission is then completed by the target's own law to a fixed length, and the joint law of those tokens must
be the target's.

Prefixes are numbered like a heap: 0 is the empty one, and prefix i followed by token x is i * V + x + 1.

Shape suffixes: R rows (a case under a script), C calls of the chooser, O outcomes of a call, S prefixes, V vocabulary,
N tree nodes, L emitted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eval import tree as trees
from eval import verify as verification
from eval.chooser import Chooser
from eval.law import Dense, Law, PointMass, dense
from eval.sampling import Context, Sampling
from eval.tree import DraftTree, TreeShape

MAX_CALLS = 24
MAX_ROWS = 60_000


def prefix_count(vocab: int, length: int) -> int:
    """How many prefixes have fewer than `length` tokens."""
    return sum(vocab**size for size in range(length))


@dataclass(frozen=True)
class Cases:
    """Targets and drafts to prove a rule on: float64 tables by case and prefix.

    logits_RSV  what the target's pass returns after each prefix.
    target_RSV  the law it stands for under the sampling settings, worked out apart from eval/sampling.py.
    draft_RSV   the draft's law.
    """

    logits_RSV: Tensor
    target_RSV: Tensor
    draft_RSV: Tensor

    @property
    def vocab(self) -> int:
        """V."""
        return self.target_RSV.shape[2]

    def __len__(self) -> int:
        return self.target_RSV.shape[0]


def random_laws(shape: tuple[int, int], vocab: int, kind: Tensor, generator: torch.Generator) -> Tensor:
    """Laws [R, S, V] by kind: 0 smooth, 1 peaked, 2 with zeros, 3 with ties, 4 one-hot."""
    raw_RSV = torch.rand(*shape, vocab, generator=generator, dtype=torch.float64) + 1e-3
    index_RSV = raw_RSV.argsort(-1).argsort(-1)
    kept_RS1 = torch.randint(1, vocab + 1, (*shape, 1), generator=generator)
    ties_RSV = torch.randint(0, 3, (*shape, vocab), generator=generator).double() + (index_RSV == 0)
    by_kind = torch.stack([raw_RSV, raw_RSV**6, raw_RSV * (index_RSV < kept_RS1), ties_RSV, (index_RSV == 0).double()])
    chosen_RSV = by_kind[kind, torch.arange(shape[0])]
    return chosen_RSV / chosen_RSV.sum(-1, keepdim=True)


def random_cases(count: int, vocab: int, depth: int, seed: int) -> Cases:
    """`count` cases for drafts of at most `depth` tokens; every seventh pair is disjoint, every eleventh equal."""
    generator = torch.Generator().manual_seed(seed)
    shape, row_R = (count, prefix_count(vocab, depth + 1)), torch.arange(count)
    target_RSV = random_laws(shape, vocab, row_R % 5, generator)
    draft_RSV = random_laws(shape, vocab, row_R // 5 % 5, generator)
    disjoint_RSV = draft_RSV * (target_RSV == 0)
    total_RS1 = disjoint_RSV.sum(-1, keepdim=True)
    apart_RSV = torch.where((row_R % 7 == 0)[:, None, None] & (total_RS1 > 0), disjoint_RSV / total_RS1, draft_RSV)
    draft_RSV = torch.where((row_R % 11 == 0)[:, None, None], target_RSV, apart_RSV)
    return Cases(target_RSV.log(), target_RSV, draft_RSV)


class ForkingChooser:
    """Plays a script of outcomes for every row, then the likeliest ones; keeps the probability of what it played."""

    def __init__(self, script_RC: Tensor, vocab: int) -> None:
        rows = script_RC.shape[0]
        self.script_RC, self.played_RC = script_RC, torch.full_like(script_RC, -1)
        self.chance_RCO = torch.zeros(rows, script_RC.shape[1], vocab, dtype=torch.float64)
        self.calls_R = torch.zeros(rows, dtype=torch.int64)
        self.weight_R = torch.ones(rows, dtype=torch.float64)
        self.rows_R = torch.arange(rows)

    def _play(self, chance_RO: Tensor, live_R: Tensor) -> Tensor:
        scripted_R = self.script_RC[self.rows_R, self.calls_R]
        # The clamp is for rows that are not live: their next scripted outcome belongs to another call.
        outcome_R = torch.where(scripted_R >= 0, scripted_R, chance_RO.argmax(-1)).clamp(max=chance_RO.shape[1] - 1)
        played_R = chance_RO.gather(1, outcome_R[:, None])[:, 0]
        self.weight_R = torch.where(live_R, self.weight_R * played_R, self.weight_R)
        rows_R, calls_R = self.rows_R[live_R], self.calls_R[live_R]
        self.played_RC[rows_R, calls_R] = outcome_R[live_R]
        self.chance_RCO[rows_R, calls_R, : chance_RO.shape[1]] = chance_RO[live_R]
        self.calls_R = self.calls_R + live_R
        return outcome_R

    def pick(self, law: Law, depth: int | Tensor, live_B: Tensor) -> Tensor:
        """See Chooser. Rows whose answer must not matter get the last token."""
        vocab = self.chance_RCO.shape[2]
        return self._play(dense(law, vocab, torch.float64), live_B).where(live_B, vocab - 1)

    def accept(self, probability_B: Tensor, depth: int, trial: int, live_B: Tensor) -> Tensor:
        """See Chooser. Rows whose answer must not matter get True."""
        chance_RO = torch.stack([1 - probability_B, probability_B], 1).to(torch.float64)
        return (self._play(chance_RO, live_B) == 1) | ~live_B

    def draft(self, law: Law, depth: int, trial: int, live_B: Tensor) -> Tensor:
        """See Chooser."""
        return self.pick(law, depth, live_B)

    def alternatives(self) -> tuple[Tensor, Tensor]:
        """What else could have been played: (row each comes from, script)."""
        step_C = torch.arange(self.played_RC.shape[1])
        free_RC = (step_C < self.calls_R[:, None]) & (self.script_RC < 0)
        other_RCO = torch.arange(self.chance_RCO.shape[2]) != self.played_RC[:, :, None]
        row, step, outcome = ((self.chance_RCO > 0) & other_RCO & free_RC[:, :, None]).nonzero().unbind(1)
        script_RC = self.played_RC[row].masked_fill(step_C > step[:, None], -1)
        script_RC[torch.arange(len(row)), step] = outcome
        return row, script_RC


@dataclass(frozen=True)
class Experiment:
    """One rule on one kind of draft.

    draft     "top_k" (the shape's child of rank r holds the r-th likeliest token), "iid" or "without_replacement".
    ragged    deterministic drafts: case i keeps only its first i % N nodes.
    prompt    tokens before the root, for penalties.
    """

    name: str
    rule: str
    draft: str
    shape: TreeShape
    vocab: int
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    ragged: bool = False
    prompt: tuple[int, ...] = (0,)
    chooser: Callable[[Tensor, int], ForkingChooser] = ForkingChooser

    @property
    def length(self) -> int:
        """Tokens whose joint law is compared: the longest emission."""
        return self.shape.max_depth + 1


def _child_prefix(prefix_R: Tensor, token_R: Tensor, vocab: int) -> Tensor:
    return torch.where((prefix_R >= 0) & (token_R >= 0) & (token_R < vocab), prefix_R * vocab + token_R + 1, -1)


def draft_tree(experiment: Experiment, draft_RSV: Tensor, chooser: Chooser) -> tuple[DraftTree, Tensor]:
    """Draft the experiment's shape for every row; also each node's prefix number [R, N] (-1: padding)."""
    shape, vocab, rows_R = experiment.shape, experiment.vocab, torch.arange(draft_RSV.shape[0])
    sampled = experiment.draft != "top_k"
    tokens = [torch.full_like(rows_R, experiment.prompt[-1])]
    prefixes = [torch.zeros_like(rows_R)]
    laws, draws_at_depth = [], [0] * (shape.max_depth + 1)
    parents = shape.parents
    for node in range(len(parents)):
        law_RV = draft_RSV[rows_R, prefixes[node].clamp(min=0)]
        laws.append(law_RV)
        width, depth, live_R = parents.count(node), len(((), *shape.paths)[node]), prefixes[node] >= 0
        if not width:
            continue
        if sampled:
            again = experiment.draft == "iid"
            drawn_RW = trees.draw_siblings(law_RV, width, again, chooser, depth, draws_at_depth[depth], live_R)
        else:
            drawn_RW = law_RV.argsort(dim=-1, descending=True, stable=True)[:, :width]
        draws_at_depth[depth] += width
        # Children of one node follow each other in the sorted shape, in the order they were drawn.
        for token_R in drawn_RW.unbind(1):
            prefixes.append(_child_prefix(prefixes[node], token_R, vocab))
            tokens.append(token_R.clamp(min=0))
    prefix_RN, tokens_RN = torch.stack(prefixes, 1), torch.stack(tokens, 1)
    parents_RN = torch.tensor(parents).expand_as(tokens_RN).where(prefix_RN >= 0, trees.PADDING)
    law: Law = Dense(torch.stack(laws, 1)) if sampled else PointMass(tokens_RN)
    tree = DraftTree(tokens_RN, parents_RN, law, shape.max_depth, shape.max_width, experiment.draft == "iid")
    return tree, prefix_RN


def one_round(experiment: Experiment, cases: Cases, case_R: Tensor, chooser: Chooser) -> verification.Verified:
    """Draft and verify once for every row, as the decode loop does."""
    tree, prefix_RN = draft_tree(experiment, cases.draft_RSV[case_R], chooser)
    if experiment.ragged:
        cut_RN = torch.arange(tree.nodes) > (case_R % tree.nodes)[:, None]
        prefix_RN = prefix_RN.masked_fill(cut_RN, -1)
        tree = replace(tree, parents_BN=tree.parents_BN.masked_fill(cut_RN, trees.PADDING))
    logits_RNV = cases.logits_RSV[case_R[:, None], prefix_RN.clamp(min=0)]
    context = None
    if experiment.sampling.needs_context:
        prompts = [experiment.prompt] * len(case_R)
        context = Context.of(prompts, [len(experiment.prompt)] * len(case_R))
    return verification.verify(logits_RNV, tree, experiment.sampling, chooser, context, experiment.rule)


def _completed(mass_RS: Tensor, target_RSV: Tensor, length: int) -> Tensor:
    """Extend mass on shorter emissions by the target's law; the joint law of `length` tokens [R, V ** length]."""
    rows, vocab = mass_RS.shape[0], target_RSV.shape[2]
    for size in range(length):
        low, high, end = (prefix_count(vocab, size + step) for step in range(3))
        grown_RSV = mass_RS[:, low:high, None] * target_RSV[:, low:high]
        mass_RS[:, high:end] += grown_RSV.reshape(rows, end - high)
    return mass_RS[:, prefix_count(vocab, length) : prefix_count(vocab, length + 1)]


def joint_deviations(
    experiment: Experiment, cases: Cases, rounds: Iterable[tuple[Tensor, verification.Verified, Tensor]]
) -> Tensor:
    """Total variation between the joint law of the emitted tokens and the target's, one number a case.

    `rounds` gives (case of each row, what verification said, probability of each row). Mass that went to ids out of
    range, or got lost, counts in full.
    """
    vocab, length = experiment.vocab, experiment.length
    mass_RS = torch.zeros(len(cases), prefix_count(vocab, length + 1), dtype=torch.float64)
    for case_R, verified, weight_R in rounds:
        prefix_R, count_R = torch.zeros_like(case_R), verified.accepted_B + 1
        for step, token_R in enumerate(verified.emitted_BL.unbind(1)):
            prefix_R = torch.where(step < count_R, _child_prefix(prefix_R, token_R, vocab), prefix_R)
        inside_R = prefix_R >= 0
        mass_RS.index_put_((case_R[inside_R], prefix_R[inside_R]), weight_R[inside_R], accumulate=True)
    joint_RJ = _completed(mass_RS, cases.target_RSV, length)
    start_RS = torch.zeros_like(mass_RS)
    start_RS[:, 0] = 1.0
    expected_RJ = _completed(start_RS, cases.target_RSV, length)
    lost_R = (1 - joint_RJ.sum(1)).abs()
    return ((joint_RJ - expected_RJ).abs().sum(1) + lost_R) / 2


def outcomes(experiment: Experiment, cases: Cases) -> Iterator[tuple[Tensor, verification.Verified, Tensor]]:
    """Every outcome of one round for every case: (case of each row, result, probability)."""
    pending = [(torch.arange(len(cases)), torch.full((len(cases), MAX_CALLS), -1))]
    while pending:
        case_R, script_RC = pending.pop()
        chooser = experiment.chooser(script_RC, experiment.vocab)
        yield case_R, one_round(experiment, cases, case_R, chooser), chooser.weight_R
        row, more_RC = chooser.alternatives()
        if len(row):
            pending += zip(case_R[row].split(MAX_ROWS), more_RC.split(MAX_ROWS), strict=True)


def deviations(experiment: Experiment, cases: Cases) -> Tensor:
    """Enumerate the experiment: total variation from the target's law, one number a case."""
    return joint_deviations(experiment, cases, outcomes(experiment, cases))
