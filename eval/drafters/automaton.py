"""An online suffix automaton (Blumer et al. 1985): all runs of the texts read so far, and what most often followed them.

Reading a token is O(1) amortised. A state stands for runs that end at the same places; its link is the longest shorter
run that ends at more. What followed is counted as in prediction by partial matching with update exclusion (Moffat
1990): a token is counted in the longest run that it has followed before and is entered, once, in all longer ones. So
counts cost nothing beyond the walk along the links that the automaton makes anyway.
"""

from __future__ import annotations

ROOT = 0


class SuffixAutomaton:
    """Every run of tokens in the texts added; `tokens` is how many were added. Nothing is ever forgotten."""

    def __init__(self) -> None:
        self.tokens = 0
        self._next: list[dict[int, int]] = []
        self._count: list[dict[int, int]] = []  # token -> times counted, where it is more than once
        self._total: list[int] = []
        self._best: list[int] = []  # the token counted most often, of equal ones the latest; -1 for none
        self._link: list[int] = []
        self._length: list[int] = []
        self._last = self._new_state(0)
        self._link[ROOT] = -1

    def begin_text(self) -> None:
        """The next token starts a text of its own."""
        self._last = ROOT

    def add(self, token: int) -> None:
        """Read one more token of the text."""
        self.tokens += 1
        state = self._last
        if token in self._next[state]:  # an earlier text had all of this one so far
            self._note(state, token, again=True)
            self._last = self._prefix(state, token)
            return
        new = self._new_state(self._length[state] + 1)
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            self._note(state, token, again=False)
            state = self._link[state]
        if state >= 0:
            self._note(state, token, again=True)
            self._link[new] = self._prefix(state, token)
        self._last = new

    def repeated(self) -> tuple[int, int]:
        """(state, its length) of the longest end of the text that stands elsewhere too; (ROOT, 0) for none."""
        if self._last == ROOT:
            return ROOT, 0
        state = self._link[self._last]
        return state, self._length[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest end, among the runs read, of the run (state, length) followed by the token."""
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return ROOT, 0
        return self._next[state][token], length + 1

    def continuation(self, state: int, most: int, least_share: float) -> list[int]:
        """Up to `most` tokens after a state: each the likeliest one, while the product of their shares is large enough.

        Where the text's end is reached, what followed its longest repeated end goes on: a loop is drafted as a loop.
        """
        found: list[int] = []
        share = 1.0
        while len(found) < most:
            while state > ROOT and not self._next[state]:
                state = self._link[state]
            if state == ROOT:
                break
            token = self._best[state]
            share *= self._count[state].get(token, 1) / self._total[state]
            if share < least_share:
                break
            found.append(token)
            state = self._next[state][token]
        return found

    def _new_state(self, length: int) -> int:
        self._next.append({})
        self._count.append({})
        self._total.append(0)
        self._best.append(-1)
        self._link.append(ROOT)
        self._length.append(length)
        return len(self._next) - 1

    def _note(self, state: int, token: int, again: bool) -> None:
        """Count a token that follows the state, `again` or for the first time."""
        counts, best = self._count[state], self._best[state]
        times = counts.get(token, 1) + 1 if again else 1
        if again:
            counts[token] = times
        self._total[state] += 1
        if best < 0 or times >= counts.get(best, 1):
            self._best[state] = token

    def _prefix(self, state: int, token: int) -> int:
        """The state of exactly the run (state, token), split off from longer runs if need be."""
        known = self._next[state][token]
        if self._length[known] == self._length[state] + 1:
            return known
        part = self._new_state(self._length[state] + 1)
        self._next[part], self._count[part] = dict(self._next[known]), dict(self._count[known])
        self._total[part], self._best[part] = self._total[known], self._best[known]
        self._link[part], self._link[known] = self._link[known], part
        while state >= 0 and self._next[state].get(token) == known:
            self._next[state][token] = part
            state = self._link[state]
        return part
