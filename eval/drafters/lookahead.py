"""Lookahead decoding (methods.md, section 5; Fu et al. 2024, sections 3.1 - 3.3): n-grams from Jacobi guesses, no model.

A window of N - 1 rows and W columns of guesses rides in every pass. The guess in row r and column c stands for the place
r + c + 1 behind the root; it sees the guesses of row 0 up to its column and those above it in its column, which is
what a tree whose row 0 is a chain, with every column hanging from it, makes it see. So the window is part of the draft
tree: the target's choice below each column gives the next row and completes W n-grams, which go into a pool; the pool's
continuations of the root are the rest of the tree. Equal paths are one node. A guess of the window may be accepted like
any draft; nothing here is sampled, so any text is the target's own.

Shapes: B rows of the batch, W columns, N nodes of the tree, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError

WIDTH, NGRAM, ENTRIES = 7, 5, 7  # W, N and G of the paper


class NgramPool:
    """Continuations by first token: at most `most` a token, the least recently added out."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_first: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Enter an n-gram, or make it the most recent."""
        entries = self._by_first.setdefault(ngram[0], OrderedDict())
        entries[tuple(ngram[1:])] = None
        entries.move_to_end(tuple(ngram[1:]))
        if len(entries) > self.most:
            entries.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed the token, the most recent first."""
        return list(reversed(self._by_first.get(token, ())))


class Window:
    """Jacobi guesses of one text: `rows[r][c]` for the place r + c + 1 behind the root. Row 0 alone at the start."""

    def __init__(self, width: int, height: int, ids: Sequence[int]) -> None:
        self.width, self.height = width, height
        self._ids, self._random = list(ids), Random(0)
        self.rows = [self._guesses(width)]

    def columns(self) -> list[list[int]]:
        """What each column's last guess sees behind the root, itself included."""
        return [self.rows[0][:column] + [row[column] for row in self.rows] for column in range(self.width)]

    def advance(self, chosen: Sequence[int], emitted: int) -> list[list[int]]:
        """Take in the target's choices below the columns and move on by the emitted tokens; returns new n-grams.

        There are none until the window is as high as it gets. Places past the last column are guessed from the text.
        """
        full = len(self.rows) == self.height
        ngrams = [[*(row[column] for row in self.rows), chosen[column]] for column in range(self.width) if full]
        self.rows.append(list(chosen))
        if full:  # every row takes the place of the one before it, which is one step towards the root
            self.rows.pop(0)
        shift = min(self.width, emitted - full)
        self.rows = [row[shift:] + self._guesses(shift) for row in self.rows]
        return ngrams

    def _guesses(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=count)


class _Row:
    """One text: its window and pool, and the nodes of its last tree that the next row is read from."""

    def __init__(self, width: int, height: int, entries: int) -> None:
        self.shape, self.pool, self.length = (width, height), NgramPool(entries), 0
        self.window: Window | None = None
        self.below = [0] * width

    def draft(self, ids: list[int], chosen: Sequence[int] | None) -> list[tuple[int, int]]:
        """(token, parent) of the nodes of the next tree; nothing for a text that has ended."""
        emitted, self.length = len(ids) - self.length, len(ids)
        if self.window is None:
            self.window = Window(*self.shape, ids)
        elif emitted and chosen is not None:
            for ngram in self.window.advance(chosen, emitted):
                self.pool.add(ngram)
        if not emitted:
            self.below = [0] * len(self.below)
            return []
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for path in self.pool.after(ids[-1]):
            _enter(nodes, path)
        self.below = [_enter(nodes, path) for path in self.window.columns()]
        return [(token, parent) for parent, token in nodes]


def _enter(nodes: dict[tuple[int, int], int], path: Sequence[int]) -> int:
    """Walk a path from the root, making the nodes that are not there; returns its last node."""
    node = 0
    for token in path:
        node = nodes.setdefault((node, token), len(nodes) + 1)
    return node


class LookaheadDrafter:
    """Drafts from its own n-grams; needs no model. A pass has up to (W + G)(N - 1) nodes beside the root.

    Reads `Committed.logits_BNV`: the target's logits after every node of the tree, window included. Its W choices a row
    come to the host with the next draft, a second synchronisation of the round.
    """

    name = "lookahead"
    taps: tuple[int, ...] = ()

    def __init__(self, width: int = WIDTH, ngram: int = NGRAM, entries: int = ENTRIES) -> None:
        """`width` columns (W), `ngram` tokens in an n-gram (N), `entries` n-grams kept for each first token (G)."""
        if width < 1 or ngram < 2 or entries < 1:
            raise HeadwayError(f"lookahead: width {width} and entries {entries} must be at least 1, ngram {ngram} 2")
        self.width, self.height, self.entries = width, ngram - 1, entries
        self.most_drafts, self.depth = (width + entries) * self.height, width - 1 + self.height

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Empty pools."""
        self._rows = [_Row(self.width, self.height, self.entries) for _ in range(rows)]
        self._below_BW: Tensor | None = None
        self._chosen_BW: Tensor | None = None

    def observe(self, committed: Committed) -> None:
        """Keep the target's choice below each column of the window that was in the pass."""
        if self._below_BW is None:  # the prefill
            return
        if committed.logits_BNV is None:
            raise TypeError("lookahead needs the logits of every node of the pass")
        rows_B1 = torch.arange(len(self._rows), device=self._below_BW.device)[:, None]
        self._chosen_BW = committed.logits_BNV[rows_B1, self._below_BW].argmax(-1)

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """The pool's continuations of the root, then the window, which cannot be cut: `length` must be None."""
        if length is not None:
            raise ValueError("lookahead drafts a window of one size")
        chosen = [None] * len(sequences) if self._chosen_BW is None else self._chosen_BW.tolist()
        pairs = [row.draft(ids, choice) for row, ids, choice in zip(self._rows, sequences, chosen, strict=True)]
        below_BW = torch.tensor([row.below for row in self._rows])
        self._below_BW = below_BW.to(root_B.device, non_blocking=True)
        return DraftTree.from_lists(root_B, pairs)
