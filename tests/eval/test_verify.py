"""Losslessness as a theorem: every outcome of the shipped functions enumerated, and every wrong rule killed by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eval import coin_grid, verify
from eval import tree as trees
from eval.chooser import SeededChooser
from eval.enumeration import Cases, Experiment, ForkingChooser, deviations, outcomes, prefix_count, random_cases
from eval.experiments import BLOCK_CHAIN, LOSSLESS, PROCESSED, SAMPLED_CHAIN, TYPICAL
from eval.law import residual
from eval.mutants import MUTANTS, AnyMutant, Mutant
from eval.sampling import Context, Sampling
from eval.tree import DraftTree, TreeShape, draw_siblings
from eval.verify import RULES
from heads.errors import HeadwayError
from tests.eval.test_sampling import processors

EXACT = 1e-12


@pytest.mark.parametrize("experiment", LOSSLESS, ids=lambda experiment: experiment.name)
def test_the_joint_law_of_the_emitted_tokens_is_the_targets(experiment: Experiment) -> None:
    cases = random_cases(200, experiment.vocab, experiment.shape.max_depth, seed=7)
    assert float(deviations(experiment, cases).max()) < EXACT


@pytest.mark.parametrize(("experiment", "prepare"), PROCESSED, ids=lambda given: getattr(given, "name", ""))
def test_processed_targets_too(experiment: Experiment, prepare: Callable[[Cases], Cases]) -> None:
    cases = random_cases(200, experiment.vocab, experiment.shape.max_depth, seed=8)
    assert float(deviations(experiment, prepare(cases)).max()) < EXACT


def test_the_cases_hold_what_breaks_rules() -> None:
    """Zeros, ties, one-hot laws, disjoint supports and equal laws are among the cases, in both roles."""
    cases = random_cases(200, 4, 3, seed=7)
    for law_RSV in (cases.target_RSV, cases.draft_RSV):
        assert (law_RSV == 0).any()
        assert (law_RSV.amax(-1) == 1).any()
        assert ((law_RSV[..., :1] == law_RSV[..., 1:]) & (law_RSV[..., :1] > 0)).any()
        assert torch.allclose(law_RSV.sum(-1), torch.ones(1, dtype=torch.float64))
    assert ((cases.target_RSV * cases.draft_RSV).sum(-1) == 0).any()
    assert (cases.target_RSV == cases.draft_RSV).all(-1).all(-1).any()


WARPERS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.7),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.2, min_p=0.3),
    "context": Sampling(temperature=0.8, repetition_penalty=1.5, bad_words=[[1, 2], [3, 3, 0]], logit_bias={2: 0.75}),
}


def processed_cases(settings: Sampling, count: int, depth: int, prompt: tuple[int, ...]) -> Cases:
    """Random logits, and the target's law at every prefix by transformers' processors."""
    generator = torch.Generator().manual_seed(5)
    vocab = 4
    logits_RSV = torch.randn(count, prefix_count(vocab, depth + 1), vocab, generator=generator, dtype=torch.float64) * 2
    prefixes: list[list[int]] = [[]]
    for prefix in prefixes:
        if len(prefixes) < logits_RSV.shape[1]:
            prefixes.extend([*prefix, token] for token in range(vocab))
    law_RSV = torch.zeros_like(logits_RSV)
    for index, prefix in enumerate(prefixes[: logits_RSV.shape[1]]):
        ids = torch.tensor([[*prompt, *prefix]]).expand(count, -1)
        scores_RV = processors(settings)(ids, logits_RSV[:, index].clone())
        greedy_RV = torch.nn.functional.one_hot(scores_RV.argmax(-1), vocab).double()
        law_RSV[:, index] = greedy_RV if settings.greedy else scores_RV.softmax(-1)
    return Cases(logits_RSV, law_RSV, random_cases(count, vocab, depth, 6).draft_RSV)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("settings", WARPERS.values(), ids=WARPERS)
def test_the_law_is_processed_at_every_position_and_for_the_bonus_token(settings: Sampling, rule: str) -> None:
    """Temperature 0 is one of the settings: the one-hot law, by the same rules."""
    prompt = (0, 3)
    cases = processed_cases(settings, count=30, depth=2, prompt=prompt)
    shape = TreeShape.of([[0], [0, 0]] if rule == "block" else [[0], [1], [0, 0]])
    draft = "top_k" if rule == "match" else "iid"
    experiment = Experiment("processed", rule, draft, shape, 4, sampling=settings, prompt=prompt)
    assert float(deviations(experiment, cases).max()) < EXACT


def test_production_coins_at_both_ends_of_their_range() -> None:
    assert float(coin_grid.grid_deviations(coin_grid.grid_cases(200, seed=3)).max()) < EXACT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_enumeration_kills_the_mutant(mutant: AnyMutant) -> None:
    deviation = float(mutant.deviations(count=40).max())
    print(f"{mutant.name}: {deviation:.4f}")
    assert deviation > 1e-3
    if isinstance(mutant, Mutant) and mutant.experiment.rule != "typical_lossy":
        # The same experiment without the change is exact, so it is the change that was caught.
        cases = mutant.prepare(random_cases(40, mutant.experiment.vocab, mutant.experiment.shape.max_depth, 1))
        assert float(deviations(replace(mutant.experiment, chooser=ForkingChooser), cases).max()) < EXACT


def test_typical_acceptance_is_said_to_be_lossy() -> None:
    assert {name: rule.lossless for name, rule in RULES.items()} == {
        "match": True,
        "rejection": True,
        "block": True,
        "typical_lossy": False,
    }
    assert float(deviations(TYPICAL, random_cases(40, 4, 3, 0)).mean()) > 0.3


# --- what may depend on what --------------------------------------------------------------------------------------------

_draw_siblings = trees.draw_siblings


def test_a_cut_that_looks_at_the_ancestors_alone_is_exact() -> None:
    """Drafting stops after a token of low confidence, which itself stays: the allowed form of a confidence cut."""
    confidence: dict[int, torch.Tensor] = {}

    def cut_after(law_RV, width, replacement, chooser, depth, trial, live_R):  # type: ignore[no-untyped-def]
        live_R = live_R & (confidence[depth - 1] >= 0.3) if depth else live_R
        drawn_RW = _draw_siblings(law_RV, width, replacement, chooser, depth, trial, live_R)
        confidence[depth] = law_RV.gather(1, drawn_RW.clamp(min=0))[:, 0]
        return drawn_RW

    cases = random_cases(100, 4, 3, seed=2)
    with patch.object(trees, "draw_siblings", cut_after):
        assert float(deviations(SAMPLED_CHAIN, cases).max()) < EXACT
        assert float(deviations(BLOCK_CHAIN, cases).max()) < EXACT


def test_re_ranking_is_exact_for_drafts_chosen_without_sampling_and_under_match() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("kept"))
    assert isinstance(mutant, Mutant)
    under_match = replace(mutant, experiment=replace(mutant.experiment, rule="match"))
    assert float(under_match.deviations().max()) < EXACT


# --- numbers known by hand ----------------------------------------------------------------------------------------------

WORDS = ("light", "warm", "packable", "durable", "roomy")
TARGET_V = torch.tensor([0.40, 0.25, 0.20, 0.10, 0.05], dtype=torch.float64)
DRAFT_V = torch.tensor([0.30, 0.10, 0.40, 0.15, 0.05], dtype=torch.float64)


def test_the_five_word_example() -> None:
    """Overlap 0.75; packable is accepted with 0.5 and warm with 1; after a rejection light 0.4 and warm 0.6."""
    assert float(torch.minimum(TARGET_V, DRAFT_V).sum()) == pytest.approx(0.75)
    chances_V = verify.acceptance(TARGET_V, DRAFT_V)
    assert dict(zip(WORDS, chances_V.tolist(), strict=True)) == pytest.approx(
        {"light": 1.0, "warm": 1.0, "packable": 0.5, "durable": 2 / 3, "roomy": 1.0}
    )
    left_V = residual(TARGET_V[None], DRAFT_V[None])[0]
    assert left_V.tolist() == pytest.approx([0.4, 0.6, 0.0, 0.0, 0.0])


def test_the_five_word_example_through_verify() -> None:
    """The draft is accepted with the overlap's probability, and the text has the target's law."""
    S = prefix_count(5, 2)
    target_RSV, draft_RSV = TARGET_V.expand(1, S, 5), DRAFT_V.expand(1, S, 5)
    cases = Cases(target_RSV.log(), target_RSV, draft_RSV)
    experiment = Experiment("words", "rejection", "iid", TreeShape.of([[0]]), 5)
    rounds = list(outcomes(experiment, cases))
    accepted = sum(float(weight_R[found.accepted_B == 1].sum()) for _, found, weight_R in rounds)
    assert accepted == pytest.approx(0.75, abs=1e-12)
    assert float(deviations(experiment, cases).max()) < EXACT


def expected_accepted(experiment: Experiment, cases: Cases) -> torch.Tensor:
    total_R = torch.zeros(len(cases), dtype=torch.float64)
    for case_R, found, weight_R in outcomes(experiment, cases):
        total_R.index_add_(0, case_R, weight_R * found.accepted_B)
    return total_R


def test_block_verification_accepts_at_least_as_much() -> None:
    """Sun et al. 2024 prove it; and token by token the expected count is a sum over paths of products of overlaps."""
    cases = random_cases(60, 3, 3, seed=4)
    token_R = expected_accepted(replace(SAMPLED_CHAIN, vocab=3), cases)
    block_R = expected_accepted(replace(BLOCK_CHAIN, vocab=3), cases)
    assert (block_R >= token_R - 1e-12).all()
    assert float((block_R - token_R).max()) > 0.01

    def by_hand(row: int, prefix: int, depth: int) -> float:
        if depth == 0:
            return 0.0
        both = torch.minimum(cases.target_RSV[row, prefix], cases.draft_RSV[row, prefix]).tolist()
        return sum(both[token] * (1 + by_hand(row, prefix * 3 + token + 1, depth - 1)) for token in range(3))

    assert token_R.tolist() == pytest.approx([by_hand(row, 0, 3) for row in range(60)], abs=1e-12)


def first_token(experiment: Experiment, target: list[float], draft: list[float]) -> list[float]:
    """The law of the first emitted token when every prefix has the same target and draft."""
    vocab = len(target)
    shape = (1, prefix_count(vocab, experiment.length), vocab)
    target_RSV, draft_RSV = (torch.tensor(law, dtype=torch.float64).expand(shape) for law in (target, draft))
    law_V = torch.zeros(vocab, dtype=torch.float64)
    for _, found, weight_R in outcomes(experiment, Cases(target_RSV.log(), target_RSV, draft_RSV)):
        law_V.index_add_(0, found.emitted_BL[:, 0], weight_R)
    return law_V.tolist()


def test_siblings_tried_in_order_of_q_give_the_known_wrong_law() -> None:
    """p = .1 .2 .7, two siblings from q = .5 .3 .2: in the order drawn they give p, by falling q .168 .107 .725."""
    experiment = Experiment("order", "rejection", "without_replacement", TreeShape.of([[0], [1]]), 3)
    p, q = [0.1, 0.2, 0.7], [0.5, 0.3, 0.2]
    assert first_token(experiment, p, q) == pytest.approx(p, abs=1e-12)
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "without replacement, tried in order of q")
    with mutant.change():
        assert first_token(experiment, p, q) == pytest.approx([0.168, 0.107, 0.725], abs=5e-4)


def test_dropping_a_draw_gives_the_known_wrong_law() -> None:
    """p = .9 .1, q = .5 .5, and draws of the second token are dropped: .95 comes out for .90."""

    def drop_second(law_RV, *how):  # type: ignore[no-untyped-def]
        drawn_RW = _draw_siblings(law_RV, *how)
        return drawn_RW.masked_fill(drawn_RW == 1, -1)

    experiment = Experiment("dropped", "rejection", "iid", TreeShape.of([[0]]), 2)
    assert first_token(experiment, [0.9, 0.1], [0.5, 0.5]) == pytest.approx([0.9, 0.1], abs=1e-12)
    with patch.object(trees, "draw_siblings", drop_second):
        assert first_token(experiment, [0.9, 0.1], [0.5, 0.5]) == pytest.approx([0.95, 0.05], abs=1e-12)


# --- edges --------------------------------------------------------------------------------------------------------------


def test_padding_is_never_accepted() -> None:
    """Padding holds token 0, the target wants token 0 everywhere: rows end where their drafts do."""
    root_B, drafts_BK = torch.tensor([0, 0, 0]), torch.zeros(3, 4, dtype=torch.int64)
    logits_BNV = torch.zeros(3, 5, 3)
    logits_BNV[..., 0] = 50.0
    law_BKV = torch.tensor([1.0, 0.0, 0.0]).expand(3, 4, 3)
    counts_B = torch.tensor([4, 0, 2])
    for rule in RULES:
        draft = DraftTree.chain(root_B, drafts_BK, counts_B, None if rule == "typical_lossy" else law_BKV)
        for settings in (Sampling(), Sampling(temperature=1.0)):
            found = verify.verify(logits_BNV, draft, settings, SeededChooser([1, 2, 3]), rule=rule)
            host = found.host([1, 1, 1])
            assert host.accepted == [4, 0, 2], rule
            assert host.path == [[0, 1, 2, 3, 4], [0], [0, 1, 2]]
            assert host.emitted == [[0] * 5, [0], [0] * 3]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("settings", [Sampling(), Sampling(temperature=1.0, top_p=0.9)], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_name_row_and_position(rule: str, settings: Sampling) -> None:
    """Met at depth 1 of row 1, whose output is 10 tokens long; a row that has ended may hold anything."""
    logits_BNV = torch.zeros(2, 2, 4)
    logits_BNV[:, 0, 3] = 80.0
    logits_BNV[1, 1, 2] = float("nan")
    law_BKV = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(2, 1, 4)
    law = None if rule in ("match", "typical_lossy") else law_BKV
    draft = DraftTree.chain(torch.tensor([0, 0]), torch.tensor([[3], [3]]), law_BKV=law)
    found = verify.verify(logits_BNV, draft, settings, SeededChooser([1, 2]), rule=rule)
    position = 10 if rule == "typical_lossy" else 11
    with pytest.raises(HeadwayError, match=f"row 1 at output position {position}"):
        found.host([4, 10])
    host = found.host([4, 10], live=[True, False])
    assert all(0 <= token < 4 for tokens in host.emitted for token in tokens)


def test_bad_logits_at_a_node_that_no_row_reaches_do_no_harm() -> None:
    logits_BNV = torch.zeros(1, 2, 4)
    logits_BNV[:, 0, 3] = 80.0
    logits_BNV[:, 1] = float("nan")
    draft = DraftTree.chain(torch.tensor([0]), torch.tensor([[2]]))
    assert verify.verify(logits_BNV, draft, Sampling(), SeededChooser([1])).host([1]).emitted == [[3]]


def test_unknown_rules_and_drafts_that_do_not_fit_are_refused() -> None:
    draft = DraftTree.root_only(torch.tensor([0]))
    with pytest.raises(HeadwayError, match="match, rejection, block, typical_lossy"):
        verify.verify(torch.zeros(1, 1, 4), draft, Sampling(), SeededChooser([0]), rule="lossy")
    draft = DraftTree.chain(torch.tensor([0]), torch.tensor([[1]]))
    with pytest.raises(HeadwayError, match="'block' verifies chains"):
        verify.verify(torch.zeros(1, 2, 4), draft, Sampling(), SeededChooser([0]), rule="block")


# --- cost ---------------------------------------------------------------------------------------------------------------


class LargestOutput(TorchDispatchMode):
    """Remembers the most elements any operation returned in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return found


@pytest.mark.parametrize("settings", WARPERS.values(), ids=WARPERS)
def test_no_law_over_all_nodes_is_ever_made(settings: Sampling) -> None:
    """8 rows x 16 nodes x 4,000 tokens: nothing larger than one law a row."""
    logits_BNV = torch.randn(8, 16, 4000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    shape = TreeShape.of([[0], [1], [2], *([0, rank] for rank in range(6)), *([0, 0, rank] for rank in range(6))])
    draft = DraftTree.static(torch.zeros(8, dtype=torch.int64), torch.arange(15).expand(8, -1), shape)
    context = Context.of([[1, 2, 0]] * 8, [2] * 8)
    with LargestOutput() as largest:
        verify.verify(logits_BNV, draft, settings, SeededChooser(range(8)), context)
    assert largest.elements <= 8 * 4000


def sampled_tree(mode: str, device: str) -> DraftTree:
    root_B, law_BNV = torch.zeros(2, dtype=torch.int64, device=device), torch.full((2, 2, 6), 1 / 6, device=device)
    if mode == "chain":
        drafts_BK = torch.ones(2, 2, dtype=torch.int64, device=device)
        return DraftTree.chain(root_B, drafts_BK, torch.ones_like(root_B), law_BNV)
    tokens_BM, shape = torch.ones(2, 3, dtype=torch.int64, device=device), TreeShape.of([[0], [1], [0, 0]])
    return DraftTree.static(root_B, tokens_BM, shape, law_BNV, mode == "iid")


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("name", ["greedy", "context"])
def test_nothing_waits_for_the_device_or_mixes_devices(rule: str, name: str) -> None:
    """A round on the meta device, which has no values: reading one on the host, or meeting a CPU tensor, would raise."""
    chooser = SeededChooser([0, 1], "meta")
    chooser.begin(torch.ones(2, dtype=torch.int64, device="meta"))
    context = Context.of([[1, 0], [0]], [1, 1], "meta")
    for mode in ("chain",) if rule == "block" else ("chain", "iid", "without_replacement"):
        draft = sampled_tree(mode, "meta")
        logits_BNV = torch.zeros(2, draft.nodes, 6, device="meta")
        found = verify.verify(logits_BNV, draft, WARPERS[name], chooser, context, rule)
        assert found.emitted_BL.device.type == "meta"
        drawn_BW = draw_siblings(logits_BNV[:, 0], 2, mode == "iid", chooser, 0, 0, chooser.seed_B == 0)
        assert drawn_BW.device.type == "meta"


def test_the_meta_device_would_notice() -> None:
    """The test above is worth something: both faults raise there."""
    value = torch.zeros(2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        value[0].item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        _ = value + torch.zeros(2)
