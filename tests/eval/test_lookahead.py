"""Lookahead: the window's attention pattern, its n-grams, its pool, and exact texts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval import decode as decoding
from eval.decode import Settings, decode
from eval.drafters import Committed
from eval.drafters.lookahead import LookaheadDrafter, NgramPool, Window
from eval.drafters.none import NoDrafter
from eval.sampling import Sampling
from eval.tree import DraftTree
from eval.verify import Verified
from heads.errors import HeadwayError
from heads.target import Target

NEW = 24


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(3, 288) for _ in range(length)] for length in (1, 7, 19, 4, 12)]


class Watched(LookaheadDrafter):
    """Checks what it is given: each column's choice is the target's after text and path, by a plain pass."""

    def __init__(self, target: Target, width: int, ngram: int, entries: int, new: int = NEW) -> None:
        super().__init__(width, ngram, entries)
        self.target, self.new, self.checked = target, new, 0
        self.ends: list[int] = []
        self.texts: list[list[int]] = []
        self.logits_BNV: torch.Tensor | None = None

    def observe(self, committed: Committed) -> None:
        # until the loop hands the logits over itself
        if committed.logits_BNV is None and self._below_BW is not None:
            committed = replace(committed, logits_BNV=self.logits_BNV)
        super().observe(committed)
        if self._chosen_BW is None:
            return
        for row, text, chosen in zip(self._rows, self.texts, self._chosen_BW.tolist(), strict=True):
            if not text:  # this row had ended
                continue
            assert row.window is not None
            for path, choice in zip(row.window.columns(), chosen, strict=True):
                logits_V = self.target.logits(self.target.states(torch.tensor([[*text, *path]])).last[0, -1])
                assert int(logits_V.argmax()) == choice
                self.checked += 1

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        first = self._chosen_BW is None
        tree = super().draft(sequences, root_B)
        if first:
            self.ends = [len(ids) - 1 + self.new for ids in sequences]
        # the loop lets rows that have ended ride along, with any root
        live = [
            len(ids) < end and ids[-1] not in self.target.eos_ids for ids, end in zip(sequences, self.ends, strict=True)
        ]
        self.texts = [list(ids) if alive else [] for ids, alive in zip(sequences, live, strict=True)]
        return tree


class Plain(NoDrafter):
    """No draft, in a loop that shows it logits."""

    logits_BNV: torch.Tensor


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the drafter the logits of each pass."""
    verify = decoding._Decoding._verify

    def shown(self: decoding._Decoding, last_BNH: torch.Tensor, tree: DraftTree) -> Verified:
        self.drafter.logits_BNV = self.target.logits(last_BNH)  # type: ignore[attr-defined]
        return verify(self, last_BNH, tree)

    monkeypatch.setattr(decoding._Decoding, "_verify", shown)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.usefixtures("hooked")
def test_greedy_equals_generate(target: Target, prompts: list[list[int]], batch: int) -> None:
    texts = [target.model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False) for ids in prompts]
    expected = [text[0, len(ids) :].tolist() for text, ids in zip(texts, prompts, strict=True)]
    drafter = Watched(target, 3, 3, 2)
    for order in (list(range(5)), [3, 0, 4, 2, 1]):
        for first in range(0, 5, batch):
            some = order[first : first + batch]
            ledger = decode(target, drafter, [prompts[number] for number in some], Settings(max_new_tokens=NEW))
            assert [output.ids for output in ledger.outputs] == [expected[number] for number in some]
    assert drafter.checked > 50


@pytest.mark.usefixtures("hooked")
def test_it_accepts_at_the_sizes_of_the_paper(target: Target, prompts: list[list[int]]) -> None:
    """A tiny random model falls into loops, which its n-grams then foretell. A second call starts anew."""
    settings = Settings(max_new_tokens=60, stop_ids=())
    drafter = Watched(target, 7, 5, 7, new=60)
    assert drafter.most_drafts == 56
    ledgers = [decode(target, drafter, [prompts[1]], settings) for _ in range(2)]
    plain = decode(target, Plain(), [prompts[1]], settings)
    assert ledgers[0].outputs[0].ids == ledgers[1].outputs[0].ids == plain.outputs[0].ids
    accepted = [[row.accepted for row in ledger.rounds] for ledger in ledgers]
    assert accepted[0] == accepted[1]
    assert sum(accepted[0]) > 5
    assert max(row.drafted for row in ledgers[0].rounds) <= 56


@pytest.mark.usefixtures("hooked")
def test_sampled_text_is_that_without_a_draft(target: Target, prompts: list[list[int]]) -> None:
    settings = Settings(max_new_tokens=NEW, sampling=Sampling(temperature=0.7), seed=2, stop_ids=())
    plain = decode(target, Plain(), prompts[:3], settings)
    ledger = decode(target, Watched(target, 3, 3, 2), prompts[:3], settings)
    assert [output.ids for output in ledger.outputs] == [output.ids for output in plain.outputs]


def test_the_tree_is_the_lookahead_pattern() -> None:
    """Fu et al. 2024, figure 2: a guess sees the root, row 0 up to its column, its own column above it, and itself."""
    window = Window(3, 3, [7])
    window.rows = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    drafter = LookaheadDrafter(3, 4, 2)
    drafter.start(1, None, Sampling())  # type: ignore[arg-type]
    row = drafter._rows[0]
    row.window, row.length = window, 4
    row.pool.add([5, 10, 20, 99])  # shares its first two tokens with the window's first column
    row.pool.add([6, 1, 2, 3])
    tree = drafter.draft([[5, 5, 5, 5, 5]], torch.tensor([5]))
    tokens, mask = tree.tokens_BN[0].tolist(), tree.mask()[0]
    seen = {tokens[node]: {tokens[other] for other in mask[node].nonzero().flatten().tolist()} for node in range(11)}
    assert seen[12] == {5, 10, 11, 12}
    assert seen[31] == {5, 10, 11, 21, 31}
    assert seen[30] == {5, 10, 20, 30}
    assert seen[99] == {5, 10, 20, 99}
    assert sorted(tokens) == sorted([5, 10, 20, 99, 11, 12, 21, 22, 30, 31, 32])
    assert [tokens[node] for node in row.below] == [30, 31, 32]
    assert tree.positions()[0].tolist() == [len(seen[token]) - 1 for token in tokens]


def test_window_rises_then_moves_with_the_text() -> None:
    """Each guess keeps the place in the text that it was made for."""
    window = Window(3, 2, [7])
    assert window.rows == [[7, 7, 7]]
    window.rows = [[11, 12, 13]]  # named by their places: the root is at 10
    assert window.advance([12, 13, 14], emitted=1) == []
    assert window.rows == [[12, 13, 7], [13, 14, 7]]  # root 11: row 0 begins at 12, row 1 at 13
    assert window.advance([14, 15, 16], emitted=1) == [[12, 13, 14], [13, 14, 15], [7, 7, 16]]
    assert window.rows == [[13, 14, 7], [14, 15, 16]]  # root 12
    window.advance([15, 16, 17], emitted=3)
    assert window.rows == [[16, 7, 7], [17, 7, 7]]  # root 15: places 16 and 17 were guessed, the rest is new
    window.advance([1, 2, 3], emitted=9)
    assert window.rows == [[7, 7, 7], [7, 7, 7]]


def test_pool_forgets_the_least_recent() -> None:
    pool = NgramPool(2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7], [8, 9, 9]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(8) == [(9, 9)]
    assert pool.after(2) == []


def test_bad_settings_are_refused() -> None:
    with pytest.raises(HeadwayError, match="ngram 1"):
        LookaheadDrafter(ngram=1)
