"""EAGLE chains and static trees: exact texts, a cache of true states alone, laws that are the ones drawn from."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare

from eval.chooser import SeededChooser
from eval.decode import Settings, decode
from eval.drafters import Drafter, eagle_passes
from eval.drafters.dynamic_tree import DynamicTreeDrafter, TreeSize
from eval.drafters.eagle import EagleDrafter, EagleTreeDrafter
from eval.drafters.eagle_passes import EaglePasses
from eval.law import Dense
from eval.sampling import Sampling
from eval.tree import DraftTree, TreeShape
from heads.eagle import EagleHead
from heads.errors import HeadwayError
from heads.target import Target
from tests.eval.eagle_heads import KINDS, SMALL, PlainForward, functions, make_head, random_prompts, small_target

NEW, SHORT = 16, 8
WIDE = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 1, 0), (2, 0, 1), (0, 1, 0, 0)])
DRAFTERS: dict[str, Callable[[EagleHead, Target], Drafter]] = {
    "chain": lambda head, target: EagleDrafter(head, functions(target), 4),
    "static": lambda head, target: EagleTreeDrafter(head, functions(target), WIDE),
    "dynamic": lambda head, target: DynamicTreeDrafter(head, functions(target), TreeSize(3, 12, 4)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small_target(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def heads(target: Target) -> dict[str, EagleHead]:
    return {kind: make_head(kind, target) for kind in KINDS} | {"deep": make_head("eagle3.1", target, num_layers=2)}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(SMALL, (1, 7, 19, 4, 12))


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": SMALL + 1, "pad_token_id": 0}
    made = [torch.tensor([ids]) for ids in prompts]
    texts = [target.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **settings) for ids_1T in made]
    return [text[0, len(ids) :].tolist() for text, ids in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(
    ("kind", "name"), [*itertools.product(["eagle", "eagle3.1"], DRAFTERS), ("eagle3", "chain"), ("deep", "static")]
)
def test_greedy_equals_generate(
    target: Target,
    heads: dict[str, EagleHead],
    prompts: list[list[int]],
    expected: list[list[int]],
    kind: str,
    name: str,
) -> None:
    drafter, settings, accepted = DRAFTERS[name](heads[kind], target), Settings(NEW, stop_ids=()), 0
    for batch in (1, 2, 5):
        for first in range(0, 5, batch):
            ledger = decode(target, drafter, prompts[first : first + batch], settings)
            assert [output.ids for output in ledger.outputs] == expected[first : first + batch]
            accepted += sum(row.accepted for row in ledger.rounds)
    assert accepted > 10, "drafts that are never accepted prove nothing"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_ends_where_it_ends_whatever_the_batch(
    target: Target, heads: dict[str, EagleHead], prompts: list[list[int]], name: str
) -> None:
    """A stop token that comes at different places: rows that have ended stay in the batch, and rounds are those alone."""
    drafter, settings = DRAFTERS[name](heads["eagle3"], target), Settings(NEW, stop_ids=(2,))
    together = decode(target, drafter, prompts, settings)
    assert len({len(output.ids) for output in together.outputs}) > 1
    for number, prompt in enumerate(prompts):
        alone = decode(target, drafter, [prompt], settings)
        assert alone.outputs[0].ids == together.outputs[number].ids
        rounds = [(row.position, row.accepted) for row in together.rounds if row.prompt == number]
        assert rounds == [(row.position, row.accepted) for row in alone.rounds]


@pytest.mark.parametrize(
    ("kind", "skipping"), [("eagle", True), ("eagle3", False), ("eagle3.1", True), ("deep", False)]
)
def test_the_cache_holds_true_states_alone(
    target: Target,
    heads: dict[str, EagleHead],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    skipping: bool,
) -> None:
    """cases.md 20 and 21: after each round tokens - 1 rows, and every draft's logits are those of passes without a cache.

    `skipping`: in some rounds nothing is drafted, and the next one reads what was committed meanwhile.
    """
    head, seen = heads[kind], []
    drafter, alone = EagleDrafter(head, functions(target), 3), PlainForward(head, target)
    chosen = prompts[1:4]
    draft, logits = drafter.draft, EaglePasses.logits

    def recorded(passes: EaglePasses, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(passes, hidden))
        return seen[-1]

    rounds = itertools.count()

    def checked(sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        if skipping and next(rounds) % 3:
            return DraftTree.root_only(root_B)
        seen.clear()
        tree = draft(sequences, root_B, length)
        cache = drafter.passes.cache
        assert cache.lengths == cache.lengths_B.tolist() == [len(ids) - 1 for ids in sequences]
        for row, ids in live(sequences, chosen, 12):
            drafts = tree.tokens_BN[row, 1:].tolist()
            for depth in range(3):
                alone_D = alone(ids, drafts[:depth])
                torch.testing.assert_close(seen[depth][row], alone_D, rtol=0, atol=1e-10)
        return tree

    monkeypatch.setattr(EaglePasses, "logits", recorded)
    monkeypatch.setattr(drafter, "draft", checked)
    ledger = decode(target, drafter, chosen, Settings(12, stop_ids=()))
    assert any(row.accepted for row in ledger.rounds)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_static_tree_holds_each_parents_choices(
    target: Target, heads: dict[str, EagleHead], prompts: list[list[int]], kind: str
) -> None:
    """Each node's token is its parent's r-th choice after the path's tokens, by a plain pass and a full sort."""
    head, known = heads[kind], heads[kind].target_ids().tolist()
    alone = PlainForward(head, target)
    trees = drafted(EagleTreeDrafter(head, functions(target), WIDE), target, prompts[1:3])
    for sequences, tree in trees[:2]:
        for row, ids in live(sequences, prompts[1:3]):
            token = {(): ids[-1]} | dict(zip(WIDE.paths, tree.tokens_BN[row, 1:].tolist(), strict=True))
            for path in WIDE.paths:
                before = [token[path[:depth]] for depth in range(1, len(path))]
                logits_D = alone(ids, before)
                assert token[path] == known[logits_D.argsort(descending=True)[path[-1]]]


def drafted(
    drafter: Drafter, target: Target, prompts: list[list[int]], settings: Settings | None = None
) -> list[tuple[list[list[int]], DraftTree]]:
    """All trees of a decode with the texts they stood behind."""
    found, draft = [], drafter.draft

    def kept(sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        tree = draft(sequences, root_B, length)
        found.append(([list(ids) for ids in sequences], tree))
        return tree

    drafter.draft = kept  # type: ignore[method-assign]
    decode(target, drafter, prompts, settings or Settings(SHORT, stop_ids=()))
    return found


def live(sequences: list[list[int]], prompts: list[list[int]], new: int = SHORT) -> list[tuple[int, list[int]]]:
    """Rows that have not ended, whose drafts are read, and their texts."""
    pairs = zip(sequences, prompts, strict=True)
    return [(row, ids) for row, (ids, prompt) in enumerate(pairs) if len(ids) < len(prompt) + new]


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_length_of_a_round(
    target: Target, heads: dict[str, EagleHead], prompts: list[list[int]], name: str
) -> None:
    """`length` cuts this round's draft: the same nodes as a drafter that never goes deeper."""
    head = heads["eagle3"]
    short: dict[str, Drafter] = {
        "chain": EagleDrafter(head, functions(target), 2),
        "static": EagleTreeDrafter(head, functions(target), WIDE, 2),
        "dynamic": DynamicTreeDrafter(head, functions(target), TreeSize(3, 12, 2)),
    }
    drafter = DRAFTERS[name](head, target)
    draft = drafter.draft
    drafter.draft = lambda sequences, root_B, length=None: draft(sequences, root_B, 2)  # type: ignore[method-assign]
    for (_, one), (_, other) in zip(
        drafted(drafter, target, prompts[:3]), drafted(short[name], target, prompts[:3]), strict=True
    ):
        assert torch.equal(one.tokens_BN, other.tokens_BN)
        assert torch.equal(one.parents_BN, other.parents_BN)
        assert one.max_depth == 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_stop_at_the_heads_last_position(
    target: Target, prompts: list[list[int]], expected: list[list[int]], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """cases.md 27: of a head of 16 positions no pass stands behind the last one; the text goes on exactly."""
    head = make_head("eagle3", target, max_position_embeddings=16)
    drafter = DRAFTERS[name](head, target)
    with caplog.at_level(logging.WARNING):
        trees = drafted(drafter, target, prompts, Settings(NEW, stop_ids=()))
    assert sum("the head has 16 positions" in record.message for record in caplog.records) == 1
    for sequences, tree in trees:
        depths = tree.positions().where(tree.valid_BN, 0).amax(1).tolist()
        most = [min(4, max(0, 18 - len(ids))) for ids in sequences]
        # the best nodes of a dynamic tree may all lie higher
        assert all(depth <= limit for depth, limit in zip(depths, most, strict=True))
        assert name == "dynamic" or depths == most
    ledger = decode(target, drafter, prompts, Settings(NEW, stop_ids=()))
    assert [output.ids for output in ledger.outputs] == expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_draft_steps_are_one_graph_a_width(
    target: Target, heads: dict[str, EagleHead], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Behind the switch: whole graphs, as many as there are widths, and the same rounds. The backend runs them as they are."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def compiled(head: EagleHead) -> Callable[..., object]:
        return torch.compile(head.run, fullgraph=True, dynamic=False, backend=backend)

    monkeypatch.setattr(eagle_passes, "_compiled_run", compiled)
    head, settings = heads["eagle3"], Settings(NEW, stop_ids=())
    plain = decode(target, DRAFTERS[name](head, target), prompts[1:3], settings)
    drafter = DRAFTERS[name](head, target)
    drafter.compiled = True  # type: ignore[attr-defined]
    again = decode(target, drafter, prompts[1:3], settings)
    assert [(row.position, row.accepted) for row in again.rounds] == [
        (row.position, row.accepted) for row in plain.rounds
    ]
    assert len(graphs) == {"chain": 1, "static": 3, "dynamic": 1}[name]


def test_bad_requests(target: Target, heads: dict[str, EagleHead]) -> None:
    with pytest.raises(HeadwayError, match="draft length 0: it must be at least 1"):
        EagleDrafter(heads["eagle"], functions(target), 0)
    with pytest.raises(HeadwayError, match="tree with candidate 3: the head's vocabulary has 3 tokens"):
        EagleTreeDrafter(heads["eagle3"], functions(target), TreeShape.of([(3,)]))


# --- sampled chains ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle", "eagle3.1"])
def test_the_stated_law_is_the_one_drawn_from(
    target: Target, heads: dict[str, EagleHead], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Warped by temperature and top-k as the target's, over all tokens, zero where the head has none."""
    head, drawn, draft = heads[kind], [], SeededChooser.draft

    def recorded(chooser: SeededChooser, law: Dense, depth: int, trial: int, live_B: torch.Tensor) -> torch.Tensor:
        drawn.append((depth, law.probs_RV))
        return draft(chooser, law, depth, trial, live_B)

    monkeypatch.setattr(SeededChooser, "draft", recorded)
    sampling = Sampling(temperature=0.7, top_k=2)
    settings = Settings(SHORT, sampling=sampling, stop_ids=())
    trees = drafted(EagleDrafter(head, functions(target), 3), target, prompts[1:4], settings)
    alone = PlainForward(head, target)
    for number, (sequences, tree) in enumerate(trees):
        assert isinstance(tree.law, Dense)
        for depth in range(3):
            assert drawn[3 * number + depth][0] == depth
            assert torch.equal(drawn[3 * number + depth][1], tree.law.probs_RV[:, depth])
        for row, ids in live(sequences, prompts[1:4]):
            drafts = tree.tokens_BN[row, 1:].tolist()
            for depth in range(3):
                scores_D = alone(ids, drafts[:depth]) / 0.7
                scores_D[scores_D < scores_D.topk(2).values[-1]] = -torch.inf
                law_V = torch.zeros(SMALL, dtype=torch.float64)
                law_V[head.target_ids()] = scores_D.softmax(-1)
                torch.testing.assert_close(tree.law.probs_RV[row, depth], law_V, rtol=0, atol=1e-10)


DRAWS = 2048


@pytest.mark.parametrize(("kind", "sampled"), [("eagle3", True), ("eagle3", False)])
def test_sampled_texts_follow_the_target(target: Target, heads: dict[str, EagleHead], kind: str, sampled: bool) -> None:
    """The joint law of three tokens over 2,048 seeds, ragged batches: Pearson's chi-square at a fixed seed."""
    prompt, counts = [1, 3, 2], torch.zeros(SMALL**3, dtype=torch.float64)
    states = target.states(torch.tensor([[*prompt, *text] for text in itertools.product(range(SMALL), repeat=3)]))
    laws_XTV = target.logits(states.last[:, 2:5]).softmax(-1)
    texts_X3 = torch.tensor(list(itertools.product(range(SMALL), repeat=3)))
    law = laws_XTV.gather(2, texts_X3[..., None])[..., 0].prod(1)
    drafter = EagleDrafter(heads[kind], functions(target), 2, sampled)
    accepted = 0
    for seed in range(0, DRAWS, 512):
        settings = Settings(3, sampling=Sampling(temperature=1.0), stop_ids=(), seed=seed)
        ledger = decode(target, drafter, [prompt] * 511 + [[0] * 9], settings)
        for output in ledger.outputs[:-1]:
            counts[output.ids[0] * SMALL**2 + output.ids[1] * SMALL + output.ids[2]] += 1
        accepted += sum(row.accepted for row in ledger.rounds)
    expected = law * counts.sum()
    rare = expected < 5
    found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert chisquare(found.numpy(), wanted.numpy()).pvalue > 0.01
    assert accepted > DRAWS / 8, "drafts that are never accepted prove nothing"


def test_penalties_count_the_draft_so_far(
    target: Target, heads: dict[str, EagleHead], prompts: list[list[int]]
) -> None:
    """Greedy under penalties: each draft is the penalised first choice, as a plain pass and a count give it."""
    sampling = Sampling(frequency_penalty=0.7)
    settings = Settings(SHORT, sampling=sampling, stop_ids=())
    head = heads["eagle3"]
    alone = PlainForward(head, target)
    for sequences, tree in drafted(EagleDrafter(head, functions(target), 3), target, prompts[1:3], settings):
        for row, ids in live(sequences, prompts[1:3]):
            drafts, start = tree.tokens_BN[row, 1:].tolist(), len(prompts[1 + row])
            for depth in range(3):
                scores_D = alone(ids, drafts[:depth])
                written = [*ids[start:], *drafts[:depth]]
                scores = {
                    token: float(score) - 0.7 * written.count(token)
                    for token, score in zip(head.target_ids().tolist(), scores_D, strict=True)
                }
                assert drafts[depth] == max(scores, key=lambda token: scores[token])
