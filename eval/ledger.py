"""The ledger: one row per verification pass and sequence. Every figure of every report is computed from it.

Tokens are counted as ids, never as re-tokenised text, and after the cut at EOS, stop string or length limit. For each
output `sum(emitted) + 1 == len(ids)`: the one is the token that the prefill gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from heads.errors import HeadwayError, atomic_write_text


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-and-verify round of one sequence.

    `position` is the length of the output before the round, the prefill token included, so a first round has 1.
    `asked` is the draft length that a controller chose (eval/adaptive.py), 0 for none; None: as the drafter pleased.
    `depth` is how deep a draft tree went; None for a chain, which is as deep as it is long.
    `drafted` counts the draft tokens proposed, `accepted` those verified before the cut, `emitted` the tokens kept
    after the cut, the target's own (bonus) token included. `stop` says what ended the output in this round: "eos",
    "stop" or "length" ("text" where a stored text is replayed); None if it goes on.

    Seconds are this row's share of the pass (the pass's time over `rows`, the rows that took part), so that sums over
    rows are wall time. `draft_s` is the drafter, `verify_s` the target's pass and the acceptance, `host_s` the rest.
    """

    prompt: int
    position: int
    drafted: int
    accepted: int
    emitted: int
    stop: str | None
    draft_s: float
    verify_s: float
    host_s: float
    rows: int = 1
    asked: int | None = None
    depth: int | None = None

    @property
    def offered(self) -> int:
        """The greatest depth at which a draft could be accepted."""
        return self.drafted if self.depth is None else self.depth

    @property
    def seconds(self) -> float:
        """This row's share of the round, in seconds."""
        return self.draft_s + self.verify_s + self.host_s


@dataclass(frozen=True, slots=True)
class Output:
    """What one decode of one prompt gave: the new ids (the prefill token is the first), and the prefill's seconds."""

    prompt: int
    ids: list[int]
    prefill_s: float
    stop: str | None


@dataclass(slots=True)
class Ledger:
    """Rounds and outputs of one run. A prompt decoded several times has several outputs; its rounds are pooled."""

    rounds: list[Round] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def absorb(self, other: Ledger, prompts: Sequence[int]) -> None:
        """Append another ledger's rows; its prompt number i becomes `prompts[i]` here."""
        self.rounds.extend(replace(row, prompt=prompts[row.prompt]) for row in other.rounds)
        self.outputs.extend(replace(row, prompt=prompts[row.prompt]) for row in other.outputs)

    def check(self) -> None:
        """Raise ValueError where the rounds do not account for every token of the outputs."""
        missing: dict[int, int] = {}
        for output in self.outputs:
            missing[output.prompt] = missing.get(output.prompt, 0) + len(output.ids) - 1
        for row in self.rounds:
            if not 0 <= row.accepted <= row.drafted or not 1 <= row.emitted <= row.accepted + 1:
                raise ValueError(f"impossible ledger row: {row}")
            missing[row.prompt] = missing.get(row.prompt, 0) - row.emitted
        for prompt, count in missing.items():
            if count:
                raise ValueError(f"ledger of prompt {prompt}: {count} output tokens more than its rounds emitted")

    def write_jsonl(self, path: Path) -> None:
        """Write every row, `kind` telling rounds from outputs, in one atomic step."""
        atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in self._lines()))

    def _lines(self) -> Iterator[dict[str, object]]:
        for row in self.rounds:
            yield {"kind": "round", **asdict(row)}
        for output in self.outputs:
            yield {"kind": "output", **asdict(output)}

    @classmethod
    def read_jsonl(cls, path: Path) -> Ledger:
        """Read what `write_jsonl` wrote. Raises HeadwayError naming the file and the line of a malformed row."""
        ledger = cls()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                kind = row.pop("kind")
                if kind == "round":
                    ledger.rounds.append(Round(**row))
                elif kind == "output":
                    ledger.outputs.append(Output(**row))
                else:
                    raise ValueError(f"unknown kind {kind!r}")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise HeadwayError(f"{path}, line {number}: not a ledger row ({error}); measure again") from error
        return ledger
