"""Suffix drafts (methods.md, section 5; Oliaro et al. 2024): what most often followed the longest repeated end of the text.

The longest end is sought in the row's own text (prompt and output) and in the outputs of earlier `decode` calls; the
longer match drafts, the row's own when they are equal. The rule for the draft's length: at most PER_MATCH tokens for
each token matched, at most `draft_length` in all, and only while the product of each token's share, among what
followed there, is at least LEAST_SHARE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.drafters.automaton import ROOT, SuffixAutomaton
from eval.drafters.lookup import chains
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError

DRAFT_LENGTH = 16
PER_MATCH = 2
LEAST_SHARE = 0.2
REMEMBERED = 100_000  # tokens of earlier outputs, about 60 MB


class Memory:
    """The outputs of earlier calls as one automaton of at most `most` tokens.

    When it is full it is made anew from the latest half, so a token still costs O(1) amortised.
    """

    def __init__(self, most: int) -> None:
        self.most, self.automaton = most, SuffixAutomaton()
        self._texts: deque[list[int]] = deque()

    def add(self, text: Sequence[int]) -> None:
        """Read an output; of one longer than half the memory the end is read."""
        kept = list(text[-max(1, self.most // 2) :])
        self._texts.append(kept)
        if self.automaton.tokens + len(kept) <= self.most:
            self._read(kept)
            return
        while sum(map(len, self._texts)) > self.most // 2 and len(self._texts) > 1:
            self._texts.popleft()
        self.automaton = SuffixAutomaton()
        for earlier in self._texts:
            self._read(earlier)

    def _read(self, text: list[int]) -> None:
        self.automaton.begin_text()
        for token in text:
            self.automaton.add(token)


class _Row:
    """One text: its own automaton, and its longest end in the memory."""

    def __init__(self, memory: SuffixAutomaton) -> None:
        self.own, self.memory = SuffixAutomaton(), memory
        self.ids: list[int] = []
        self.prompt = 0
        self.state, self.length = ROOT, 0

    def read(self, ids: list[int]) -> None:
        """Take in what the text has gained."""
        if not self.ids:
            self.prompt = len(ids) - 1  # the first draft comes after the prefill's token
        for token in ids[len(self.ids) :]:
            self.ids.append(token)
            self.own.add(token)
            self.state, self.length = self.memory.follow(self.state, self.length, token)

    def draft(self, most: int) -> list[int]:
        """See the module."""
        state, length = self.own.repeated()
        automaton = self.own
        if self.length > length:
            automaton, state, length = self.memory, self.state, self.length
        return automaton.continuation(state, min(most, PER_MATCH * length), LEAST_SHARE)


class SuffixDrafter:
    """Drafts from suffix automata; needs no model.

    `remembered` is how many tokens of earlier outputs are kept, 0 for none: what a measurement that decodes one prompt
    more than once has to take, as it would otherwise be told the answers.
    """

    name = "suffix"
    taps: tuple[int, ...] = ()

    def __init__(self, draft_length: int = DRAFT_LENGTH, remembered: int = REMEMBERED) -> None:
        if draft_length < 1 or remembered < 0:
            raise HeadwayError(
                f"suffix: draft_length {draft_length} must be at least 1, remembered {remembered} not negative"
            )
        self.most_drafts = self.depth = draft_length
        self._memory = Memory(remembered)
        self._rows: list[_Row] = []

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Remember the last call's outputs, as far as drafts were made for them, and begin new texts."""
        if self._memory.most:
            for row in self._rows:
                self._memory.add(row.ids[row.prompt :])
        self._rows = [_Row(self._memory.automaton) for _ in range(rows)]

    def observe(self, committed: Committed) -> None:
        """Nothing to learn: the texts are handed in with each draft."""

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        """A chain a row, as long as the rule allows."""
        for row, ids in zip(self._rows, sequences, strict=True):
            row.read(ids)
        return chains(root_B, [row.draft(length or self.depth) for row in self._rows])
