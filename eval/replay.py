"""Replay: the accepted lengths of decoding from one teacher-forced pass over text that the target wrote (methods.md, section 4).

Where a draft is chosen without sampling, the text decides what is accepted: at temperature 0 because the target's next
token is the text's, at any other because the second lossless rule draws that token first (eval/verify.py, `match`). So
for every place a round could start from it is known how deep it gets, and the rounds follow one another through the text:
tau without a target, for the price of one pass of the head.

Shapes: P packed rows (whose next token is the assistant's), R rows of a chunk, S steps, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data_prep.store import StoredConversation
from eval.ledger import Ledger, Output, Round
from eval.metrics import acceptance, mean_accepted_length
from eval.replay_steps import TextRows, TextSteps, most_steps, steps_over
from eval.tree import TreeShape
from heads.checkpoint import Head
from heads.errors import HeadwayError
from heads.losses import Output as OutputFunction
from heads.mapped import MappedHead
from heads.medusa import MedusaHead
from heads.target import TargetEnds

CHUNK_ELEMENTS = 2**22  # logits held at a time
TEXT_END = "text"  # what ends a replayed output: the stored text goes no further


@dataclass(frozen=True)
class TextRanks:
    """What the draft makes of one text: `ranks_PS` is the rank of the text's token among the candidates, 0 the first choice.

    D where the token cannot be drafted; -1 where the turn has ended, the head's positions end, or an earlier step already
    had a rank that no tree in question holds. `tokens`: the assistant's tokens of each unbroken run, in the order of the rows.
    """

    ranks_PS: Tensor
    reach_P: Tensor
    tokens: list[list[int]]


def chain(steps: int) -> TreeShape:
    """The shape of a chain."""
    return TreeShape(tuple((0,) * depth for depth in range(1, steps + 1)))


@torch.no_grad()
def text_ranks(
    head: Head, ends: TargetEnds, stored: StoredConversation, steps: int, candidates: int | None = None
) -> TextRanks:
    """The ranks of one text's tokens. Rows are followed while the rank is below `candidates` (None: to the end).

    Raises HeadwayError for more steps than the head has, and heads that cannot be replayed.
    """
    rows, made = steps_over(head, ends, stored, steps)
    return TextRanks(_ranks(rows, made, _vocabulary(head), candidates), rows.reach_P.cpu(), _runs(stored, rows))


def _vocabulary(head: Head) -> int:
    assert isinstance(head, MappedHead)
    return head.config.output_size


def _ranks(rows: TextRows, made: TextSteps, draft_size: int, candidates: int | None) -> Tensor:
    ranks_PS = torch.full_like(rows.labels_PS, -1)
    followed_P = torch.ones_like(rows.index_P, dtype=torch.bool)
    for step in range(rows.labels_PS.shape[1]):
        asked_R = (followed_P & (rows.labels_PS[:, step] >= 0) & (rows.reach_P > step)).nonzero()[:, 0]
        for chunk_R in _chunks(asked_R, draft_size):
            ranks_PS[chunk_R, step] = _rank(made.logits(step, chunk_R), rows.draft_PS[chunk_R, step])
        followed_P = ranks_PS[:, step] >= 0
        if candidates is not None:
            followed_P &= ranks_PS[:, step] < candidates
    return ranks_PS.cpu()


def _chunks(rows_R: Tensor, draft_size: int) -> list[Tensor]:
    return list(rows_R.split(max(1, CHUNK_ELEMENTS // draft_size))) if len(rows_R) else []


def _rank(logits_RD: Tensor, labels_R: Tensor) -> Tensor:
    """[R]: how many ids come before the label; of equal logits the smaller id comes first, as argmax has it."""
    label_R1 = labels_R.clamp(min=0)[:, None]
    own_R1 = logits_RD.gather(1, label_R1)
    smaller_RD = torch.arange(logits_RD.shape[1], device=labels_R.device) < label_R1
    rank_R = ((logits_RD > own_R1) | ((logits_RD == own_R1) & smaller_RD)).sum(1)
    return rank_R.where(labels_R >= 0, logits_RD.shape[1])


def _runs(stored: StoredConversation, rows: TextRows) -> list[list[int]]:
    index_P, segment_P = rows.index_P.cpu(), rows.segment_P.cpu()
    tokens_P = stored.ids_T[index_P + 1]
    return [tokens_P[segment_P == run].tolist() for run in segment_P.unique().tolist()]


def walk(texts: Iterable[TextRanks], shape: TreeShape, limit: int | None = None) -> Ledger:
    """The rounds of decoding every assistant turn with drafts of this shape; outputs are numbered in the order of the turns.

    `limit`: new tokens of each output, as `max_new_tokens`; None: as long as the text. Equal to the decode loop's rounds,
    but for `accepted` and `drafted` where all drafts down to an output's last token were accepted: what comes behind the
    cut is in no text, and not counted here.
    Raises HeadwayError where the ranks are of fewer steps than the shape is deep.
    """
    ledger, nodes = Ledger(), [sum(depth <= level for depth in shape.depths) for level in range(shape.max_depth + 1)]
    paths = set(shape.paths)
    for text in texts:
        if text.ranks_PS.shape[1] < shape.max_depth:
            raise HeadwayError(f"tree of depth {shape.max_depth}: the ranks are of {text.ranks_PS.shape[1]} steps")
        ranks, reach, first = text.ranks_PS.tolist(), text.reach_P.tolist(), 0
        for tokens in text.tokens:
            number, ids = len(ledger.outputs), tokens[:limit]
            done = 1  # the prefill's token is the first round's root
            while done < len(ids):
                row = first + done - 1
                left, drafted = len(ids) - done, min(shape.max_depth, reach[row])
                accepted = _depth(ranks[row], paths, min(drafted, left))
                emitted = min(accepted + 1, left)
                stop = TEXT_END if emitted == left else None
                drafted = left if accepted == left else drafted
                ledger.rounds.append(Round(number, done, nodes[drafted], accepted, emitted, stop, 0.0, 0.0, 0.0))
                done += emitted
            ledger.outputs.append(Output(number, ids, 0.0, TEXT_END))
            first += len(tokens)
    return ledger


def _depth(ranks: Sequence[int], paths: set[tuple[int, ...]], most: int) -> int:
    depth = 0
    while depth < most and tuple(ranks[: depth + 1]) in paths:
        depth += 1
    return depth


@dataclass
class Replayed:
    """Rounds of a replay, and the overlap sum_x min(p, q) of each step, summed over the `rows_S` places that drafted it.

    The sum runs over the draft vocabulary, with p over the whole one: what a draft sampled from q is accepted with.
    """

    ledger: Ledger = field(default_factory=Ledger)
    overlap_S: list[float] = field(default_factory=list)
    rows_S: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Emitted tokens per round, pooled; 1 where no text has a second token."""
        return mean_accepted_length(self.ledger).micro or 1.0

    def figures(self) -> dict[str, Any]:
        """What a validation records: tau, acceptance by depth among the drafts that were reached, overlap there."""
        return {
            "replayed_tau": self.tau,
            "replayed_acceptance": acceptance(self.ledger).conditional,
            "overlap": [
                total / rows if rows else None for total, rows in zip(self.overlap_S, self.rows_S, strict=True)
            ],
            "replayed_rounds": len(self.ledger.rounds),
            "replayed_tokens": sum(row.emitted for row in self.ledger.rounds),
        }

    @staticmethod
    def joined(parts: Sequence[Replayed]) -> Replayed:
        """The replay of all texts of some replays with the same steps."""
        whole = Replayed()
        for part in parts:
            first = len(whole.ledger.outputs)
            whole.ledger.absorb(part.ledger, range(first, first + len(part.ledger.outputs)))
        whole.overlap_S = [sum(sums) for sums in zip(*(part.overlap_S for part in parts), strict=True)]
        whole.rows_S = [sum(counts) for counts in zip(*(part.rows_S for part in parts), strict=True)]
        return whole


@torch.no_grad()
def replay(
    head: Head,
    ends: TargetEnds,
    conversations: Iterable[StoredConversation],
    steps: int | None = None,
    shape: TreeShape | None = None,
    law: OutputFunction | None = None,
) -> Replayed:
    """Replay every assistant turn with drafts of `shape`, a chain of `steps` by default.

    `law`: the target's output function over the draft vocabulary, [R, H] -> [R, D], for the overlap; None takes the
    columns of `ends.logits`. Raises HeadwayError for a shape that the head cannot draft.
    """
    steps = steps or most_steps(head)
    shape = shape or (chain(steps) if steps else None)
    if shape is None:
        raise HeadwayError("replay: give the number of steps, or the shape of the draft")
    if isinstance(head, MedusaHead) and head.config.hydra and shape.max_width > 1:
        raise HeadwayError("Hydra heads draft a chain; a tree of shared candidates does not fit them")
    return Replayed.joined([_one(head, ends, stored, shape, law) for stored in conversations])


def _one(
    head: Head, ends: TargetEnds, stored: StoredConversation, shape: TreeShape, law: OutputFunction | None
) -> Replayed:
    rows, made = steps_over(head, ends, stored, shape.max_depth)
    ranks_PS = _ranks(rows, made, _vocabulary(head), 1 + max(shape.ranks))
    text = TextRanks(ranks_PS, rows.reach_P.cpu(), _runs(stored, rows))
    ledger = walk([text], shape)
    if law is None:
        assert isinstance(head, MappedHead)
        ids_D, dtype = head.target_ids(), ends.lm_head_weight.dtype

        def law(last_RH: Tensor) -> Tensor:
            return ends.logits(last_RH.to(dtype))[..., ids_D]

    reached = _reached(ledger, text, shape.max_depth)
    overlaps = [
        _overlap(stored, rows, made, step, places_R.to(rows.index_P.device), law, _vocabulary(head))
        for step, places_R in enumerate(reached)
    ]
    return Replayed(ledger, overlaps, [len(places_R) for places_R in reached])


def _reached(ledger: Ledger, text: TextRanks, steps: int) -> list[Tensor]:
    """For each step the packed rows of rounds that drafted it behind drafts that were right."""
    starts = [0]
    for tokens in text.tokens:
        starts.append(starts[-1] + len(tokens))
    rows = [(starts[row.prompt] + row.position - 1, row.accepted) for row in ledger.rounds]
    served = text.ranks_PS.tolist()
    return [
        torch.tensor([row for row, accepted in rows if accepted >= step and served[row][step] >= 0], dtype=torch.int64)
        for step in range(steps)
    ]


def _overlap(
    stored: StoredConversation,
    rows: TextRows,
    made: TextSteps,
    step: int,
    places_R: Tensor,
    law: OutputFunction,
    draft_size: int,
) -> float:
    total = 0.0
    for chunk_R in _chunks(places_R, draft_size):
        # the law of token t + 2 + step is that of position t + 1 + step
        at_R = (rows.index_P[chunk_R] + 1 + step).to(stored.last_TH.device)
        log_z_R1 = stored.lse_T[at_R].to(chunk_R.device)[:, None]
        logits_RD = law(stored.last_TH[at_R].to(chunk_R.device))
        p_RD = (logits_RD.to(log_z_R1.dtype) - log_z_R1).exp()
        q_RD = made.logits(step, chunk_R).to(p_RD.dtype).softmax(-1)
        total += float(torch.minimum(p_RD, q_RD).sum())
    return total
