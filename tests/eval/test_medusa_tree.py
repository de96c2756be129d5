"""Candidate trees of Medusa heads: growth against brute force, measurement against sorting, drafts against replay."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.collect import Settings as CollectSettings
from data_prep.collect import collect
from data_prep.store import FeatureStore, StoredConversation
from eval.contenders import build
from eval.decode import Settings, decode
from eval.drafters.medusa import TREE, MedusaTreeDrafter, read_tree
from eval.grow_tree import Options, grow_tree, held_out_conversations, measure_ranks, prompt_of
from eval.growth import PRIOR, accepted_length, conditional_accuracies, grow, measured_shares
from eval.tree import TreeShape
from eval.tree_size import PATIENCE, SIZES, round_cost, try_sizes
from heads.checkpoint import MANIFEST
from heads.errors import HeadwayError
from heads.medusa import MedusaConfig, MedusaHead
from heads.target import Target
from heads.vocabulary import DraftVocabulary
from tests.eval.eagle_heads import make_head

NEW, HEADS, DRAFT_VOCABULARY = 24, 3, 200
WIDE = TreeShape.of([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 2)])


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def head(target: Target) -> MedusaHead:
    """Untrained but not blind: a draft vocabulary, blocks off the identity, outputs that start as the target's."""
    generator = torch.Generator().manual_seed(0)
    ids_D = torch.randperm(target.vocab_size, generator=generator)[:DRAFT_VOCABULARY].sort().values
    made = MedusaHead.from_target(
        MedusaConfig(target.hidden_size, target.vocab_size, DRAFT_VOCABULARY, HEADS),
        target.ends.lm_head_weight,
        DraftVocabulary(ids_D, target.vocab_size),
    )
    with torch.no_grad():
        for parameter in made.blocks.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    made.manifest = {
        "target": {"name": str(target.path), "fingerprint": target.fingerprint},
        "recipe": {"data": {"features": "nowhere", "held_out": 5}},
    }
    return made.double().eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(3, 288) for _ in range(length)] for length in (1, 7, 19, 4, 12)]


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    texts = [target.model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False) for ids in prompts]
    return [text[0, len(ids) :].tolist() for text, ids in zip(texts, prompts, strict=True)]


def subtrees(paths: list[tuple[int, ...]], size: int) -> list[tuple[tuple[int, ...], ...]]:
    """All choices of `size` paths that hang together."""
    return [
        chosen for chosen in itertools.combinations(paths, size) if all(path[:-1] in {(), *chosen} for path in chosen)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_greedy_growth_is_the_best_subtree(seed: int) -> None:
    """Shares that differ by prefix, in any order, with ties and zeros: no subtree of the same size accepts more."""
    source = random.Random(seed)
    heads, ranks = [(2, 3), (3, 2), (1, 4)][seed % 3]
    paths = [path for depth in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=depth)]
    table = {}
    for prefix in [(), *paths]:
        raw = [source.random() for _ in range(ranks)]
        if seed % 4 == 1:
            raw = [float(source.randrange(3)) for _ in range(ranks)]
        if seed % 4 == 2:
            raw[0] = 0.0
        table[prefix] = [] if len(prefix) == heads else [share / (sum(raw) + 0.1) for share in raw]

    def worth(tree: tuple[tuple[int, ...], ...]) -> float:
        return sum(prod(table[path[:depth]][rank] for depth, rank in enumerate(path)) for path in tree)

    for size in range(1, 6):
        try:
            shape = grow(table.__getitem__, size)
        except HeadwayError:
            assert sum(table[()]) == 0
            continue
        best = max((worth(tree) for tree in subtrees(paths, min(size, len(paths)))), default=0.0)
        assert worth(shape.paths) == pytest.approx(best, abs=1e-12)
        assert len(shape.paths) == size or worth(shape.paths) == pytest.approx(worth(tuple(paths)))


def test_growth_refuses_what_has_no_tree() -> None:
    with pytest.raises(HeadwayError, match="tree of 0 nodes"):
        grow(lambda path: [0.5, 0.5], 0)
    with pytest.raises(HeadwayError, match="never right"):
        grow(lambda path: [0.0, 0.0], 4)


def test_shares_are_those_behind_the_prefix() -> None:
    """Two ranks. Behind 0 the second head is right 3 times of 4 at its first; behind 1 never, in 2 positions."""
    ranks_PK = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 1], [1, 2], [1, 2], [0, -1], [2, 0]])
    shares, average = measured_shares(ranks_PK, 2), conditional_accuracies(ranks_PK, 2)
    torch.testing.assert_close(average, torch.tensor([[5 / 8, 2 / 8], [3 / 6, 1 / 6]], dtype=torch.float64))
    assert shares(()) == pytest.approx([5 / 8, 2 / 8])
    assert shares((0,)) == pytest.approx([(3 + PRIOR * 3 / 6) / (4 + PRIOR), (1 + PRIOR / 6) / (4 + PRIOR)])
    assert shares((1,)) == pytest.approx([(PRIOR * 3 / 6) / (2 + PRIOR), (PRIOR / 6) / (2 + PRIOR)])
    assert list(shares((0, 0))) == []


def test_conditional_accuracies_and_accepted_length_by_hand() -> None:
    """Three ranks of two heads; 3 = not among them, -1 = the text ended."""
    ranks_PK = torch.tensor([[0, 1], [0, 0], [1, 0], [3, 0], [2, 3], [0, -1]])
    expected = torch.tensor([[3 / 6, 1 / 6, 1 / 6], [2 / 4, 1 / 4, 0]], dtype=torch.float64)
    torch.testing.assert_close(conditional_accuracies(ranks_PK, 3), expected)
    assert accepted_length(ranks_PK, TreeShape.of([(0,), (0, 0)])) == pytest.approx((1 + 2 + 0 + 0 + 0 + 1) / 6)
    assert accepted_length(ranks_PK, TreeShape.of([(0,), (1,), (1, 0)])) == pytest.approx((1 + 1 + 2 + 0 + 0 + 1) / 6)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_greedy_equals_generate(
    target: Target, head: MedusaHead, prompts: list[list[int]], expected: list[list[int]], batch: int
) -> None:
    drafter = MedusaTreeDrafter(head, WIDE)
    for order in (list(range(5)), [3, 0, 4, 2, 1]):
        for first in range(0, 5, batch):
            some = order[first : first + batch]
            ledger = decode(target, drafter, [prompts[number] for number in some], Settings(max_new_tokens=NEW))
            assert [output.ids for output in ledger.outputs] == [expected[number] for number in some]


def held_out_rows(store: Path, count: int) -> list[StoredConversation]:
    return list(itertools.chain.from_iterable(held_out_conversations(FeatureStore.open(store), count)))


def rank_paths(target: Target, head: MedusaHead, ids: list[int]) -> list[list[int]]:
    """At each position t, the ranks that the heads give tokens t + 2, t + 3, ... by a plain pass and a full sort."""
    last_TH = target.states(torch.tensor([ids])).last[0]
    logits_TKD = head.draft_logits(last_TH)
    order = [[row.argsort(descending=True).tolist() for row in heads] for heads in logits_TKD]
    known = head.target_ids().tolist()
    return [
        [
            [known[draft] for draft in order[t][k]].index(ids[t + 2 + k]) if ids[t + 2 + k] in known else len(known)
            for k in range(HEADS)
            if t + 2 + k < len(ids)
        ]
        for t in range(len(ids))
    ]


def test_every_round_accepts_the_deepest_path_of_the_text(
    target: Target, head: MedusaHead, prompts: list[list[int]]
) -> None:
    """Replay: from the text and the heads' ranks alone follows what each round of the decode loop has accepted."""
    settings = Settings(max_new_tokens=NEW + HEADS, stop_ids=())
    ledger = decode(target, MedusaTreeDrafter(head, WIDE), prompts, settings)
    paths, accepted = set(WIDE.paths), 0
    for number, prompt in enumerate(prompts):
        ids = [*prompt, *ledger.outputs[number].ids]
        ranks = rank_paths(target, head, ids)
        for row in (row for row in ledger.rounds if row.prompt == number and row.position <= NEW - HEADS):
            path = tuple(ranks[len(prompt) + row.position - 2])
            deepest = next(depth for depth in range(HEADS, -1, -1) if depth == 0 or path[:depth] in paths)
            assert row.accepted == deepest
            accepted += deepest
    assert accepted > 0, "drafts that are never accepted prove nothing"


def test_draft_length_cuts_the_tree(target: Target, head: MedusaHead) -> None:
    drafter = MedusaTreeDrafter(head, WIDE, 2)
    assert drafter.most_drafts == 8
    assert drafter.shape.max_depth == 2
    with pytest.raises(HeadwayError, match="heads for 1 to 3"):
        MedusaTreeDrafter(head, WIDE, 4)
    with pytest.raises(HeadwayError, match="3 heads with 200 candidates"):
        MedusaTreeDrafter(head, TreeShape.of([(0,), (200,)]))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_conversations: Path) -> Path:
    folder = tmp_path_factory.mktemp("tree") / "store"
    source = {"conversations": tiny_conversations, "target": str(tiny_target_dir)}
    collect(CollectSettings(**source, out=folder, dtype="float32", store_dtype="float32", held_out=0))  # type: ignore[arg-type]
    return folder


def test_measured_ranks_equal_a_full_sort(head: MedusaHead, store: Path, target: Target) -> None:
    conversations = held_out_rows(store, 3)
    assert len({stored.id for stored in conversations}) == 3
    ranks_PK = measure_ranks(head, target.ends, conversations, 5, HEADS)
    wanted = []
    for stored in conversations:
        ids, turn = stored.ids_T.tolist(), stored.turn_T.tolist()
        order = head.target_ids()[head.draft_logits(stored.last_TH.double()).argsort(descending=True)]
        for t in range(len(ids) - 2):
            served = [turn[t + 1] > 0 and turn[t + 1 : t + 3 + k] == [turn[t + 1]] * (k + 2) for k in range(HEADS)]
            if served[0]:
                found = [
                    (order[t, k] == ids[min(t + 2 + k, len(ids) - 1)]).nonzero().flatten().tolist()
                    for k in range(HEADS)
                ]
                wanted.append(
                    [min(5, (places or [5])[0]) if counts else -1 for places, counts in zip(found, served, strict=True)]
                )
    assert ranks_PK.tolist() == wanted
    assert (ranks_PK == -1).any()
    assert ((ranks_PK >= 0) & (ranks_PK < 5)).any()


def test_grown_saved_and_drafted(
    target: Target, head: MedusaHead, store: Path, tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    folder = tmp_path / "head"
    head.save_pretrained(folder)
    with pytest.raises(HeadwayError, match="no candidate tree yet; run eval"):
        build(f"medusa-tree:{folder}", target, None)
    grown = grow_tree(Options(head=folder, size=8, ranks=100, features=store, device="cpu"))
    shape = read_tree(folder)
    assert len(shape.paths) == 8
    rows = held_out_rows(store, 5)
    ranks = [measure_ranks(head.float(), target.ends, rows[first::2], 100, HEADS) for first in (0, 1)]
    head.double()
    across = [accepted_length(ranks[1 - half], grow(measured_shares(ranks[half], 100), 8)) for half in (0, 1)]
    mean = (across[0] * len(ranks[1]) + across[1] * len(ranks[0])) / (len(ranks[0]) + len(ranks[1]))
    assert grown["accepted"] == pytest.approx(mean)
    assert grown["conversations"] == 5
    contender = build(f"medusa-tree:{folder}", target, None)
    assert contender.head == str(folder)
    ledger = decode(target, contender.drafter, prompts, Settings(max_new_tokens=NEW))
    assert [output.ids for output in ledger.outputs] == expected

    (folder / MANIFEST).write_text((folder / MANIFEST).read_text() + "\n")
    with pytest.raises(HeadwayError, match="other weights"):
        read_tree(folder)
    (folder / TREE).write_text(json.dumps({"paths": [[0, 0]], "head_manifest_sha256": ""}))
    with pytest.raises(HeadwayError, match=r"path \[0, 0\] has no parent"):
        read_tree(folder)
    (folder / TREE).write_text("[]")
    with pytest.raises(HeadwayError, match="not a candidate tree"):
        read_tree(folder)


@pytest.mark.parametrize("per_node", [0.0, 0.03, 0.5])
def test_the_size_is_the_one_that_decodes_fastest(
    head: MedusaHead, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_node: float
) -> None:
    """Made-up costs of a node: the tree is the one that its size alone would give, and no size tried is faster."""
    head.save_pretrained(tmp_path)
    options = Options(head=tmp_path, ranks=100, features=store, device="cpu")
    alone = {size: grow_tree(replace(options, size=size)) for size in SIZES}
    monkeypatch.setattr(
        "eval.grow_tree.round_cost", lambda head, target, shape, prompts: 1 + per_node * len(shape.paths)
    )
    grown = grow_tree(options)
    tried = grown.pop("sizes_tried")
    for row in tried:
        assert row["accepted"] == alone[row["size"]]["accepted"]
        assert row["speedup"] == pytest.approx((1 + row["accepted"]) / (1 + per_node * row["size"]))
    size = max(tried, key=lambda row: row["speedup"])["size"]
    assert grown == {key: value for key, value in alone[size].items() if key != "sizes_tried"}
    assert (len(tried) == PATIENCE + 1) == (per_node > 0)  # where nodes cost something, the smallest tree wins here


def test_sizes_are_tried_until_two_in_a_row_are_slower() -> None:
    """Speedups 1.0, 1.2, 1.1, 1.3, 1.2, 1.25, 9: the last one comes too late to be tried."""
    speedups = {1: 1.0, 2: 1.2, 3: 1.1, 4: 1.3, 5: 1.2, 6: 1.25, 7: 9.0}
    shapes = [TreeShape.of([(rank,) for rank in range(size)]) for size in speedups]
    tried = list(try_sizes(iter(shapes), lambda size: 1.0, lambda shape: 2 / speedups[len(shape.paths)]))
    assert [each.size for each in tried] == [1, 2, 3, 4, 5, 6]
    assert [each.speedup for each in tried] == pytest.approx([1.0, 1.2, 1.1, 1.3, 1.2, 1.25])


def test_a_tree_that_cannot_grow_ends_the_search() -> None:
    shapes = [TreeShape.of([(0,)]), TreeShape.of([(0,), (1,)]), TreeShape.of([(0,), (1,)])]
    assert [each.size for each in try_sizes(shapes, lambda size: size, lambda shape: 1.0)] == [1, 2]


def test_rounds_are_timed_by_decoding(head: MedusaHead, target: Target, prompts: list[list[int]]) -> None:
    """A tree's round does what the baseline's does, over more tokens, and drafts."""
    assert 1 < round_cost(head, target, WIDE, prompts[1:4]) < 1000


def test_a_prompt_ends_where_the_first_answer_begins(store: Path) -> None:
    for stored in held_out_rows(store, 5):
        prompt = prompt_of(stored)
        assert prompt == stored.ids_T[: len(prompt)].tolist()
        assert stored.turn_T[: len(prompt)].tolist() == [0] * len(prompt)
        assert stored.turn_T[len(prompt)] > 0


def test_grown_for_an_eagle_head(
    target: Target,
    store: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks behind every prefix come from the replay; the tree is drafted, and the text is the target's."""
    folder = tmp_path / "eagle"
    head = make_head("eagle", target)
    head.manifest = {
        "target": {"name": str(target.path), "fingerprint": target.fingerprint},
        "recipe": {"data": {"features": str(store), "held_out": 5}},
    }
    head.save_pretrained(folder)
    found = grow_tree(Options(head=folder, depth=3, ranks=288, device="cpu"))
    tried = found["sizes_tried"]
    assert [row["size"] for row in tried] == list(SIZES[: len(tried)])
    chained = f"the chain: 3 nodes, {found['accepted_by_chain']:.3f} drafts accepted a round of "
    assert chained in capsys.readouterr().out
    grown = grow_tree(Options(head=folder, size=6, depth=3, ranks=288, device="cpu"))
    assert len(grown["paths"]) == 6
    drafter = build(f"eagle-static:{folder}", target, None).drafter
    assert drafter.most_drafts == 6
    ledger = decode(target, drafter, prompts, Settings(max_new_tokens=NEW))
    assert [output.ids for output in ledger.outputs] == expected


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"size": 0}, "size 0: give 1 to 1024 nodes"),
        ({"size": 10**6}, "size 1000000: give 1 to 1024 nodes"),
        ({"ranks": 0}, "ranks 0: give at least 1"),
        ({"depth": 0}, "depth 0: give at least 1"),
        ({"dtype": "float7"}, "dtype 'float7': unknown"),
        ({"device": "toaster"}, "device 'toaster': unknown"),
        ({"device": "cuda:77"}, r"device 'cuda:77': there are \d+ CUDA devices here"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(option: dict[str, Any], error: str) -> None:
    with pytest.raises(HeadwayError, match=error):
        grow_tree(Options(head=Path("nowhere"), **option))


def test_bad_requests_of_the_script(head: MedusaHead, store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    other = {**head.manifest, "target": {"name": "other", "fingerprint": "f" * 64}}
    mine, head.manifest = head.manifest, other
    head.save_pretrained(folder)
    head.manifest = mine
    with pytest.raises(HeadwayError, match="the head is for ffffffffffffffff"):
        grow_tree(Options(head=folder, features=store, device="cpu"))
    head.save_pretrained(folder)
    with pytest.raises(HeadwayError, match="25 conversations held out of 24"):
        grow_tree(Options(head=folder, features=store, held_out=25, device="cpu"))
    script = Path(__file__).parents[2] / "eval" / "grow_tree.py"
    done = subprocess.run(
        [sys.executable, script, "--head", tmp_path / "none"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "no such folder" in done.stderr
