"""The one decode loop: draft, verify, accept, commit, one ledger row a sequence.

The baseline is this loop with the empty drafter; greedy is temperature 0. A batch is rows with their own lengths:
prompts are padded inside a pass, never in the cache, and rows that have ended stay in the batch unread.

Shapes: B rows, T prompt positions, N tree nodes, L path length, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from eval.adaptive import LengthController
from eval.chooser import SeededChooser
from eval.clock import Clock
from eval.drafters import Committed, Drafter
from eval.ledger import Ledger, Output, Round
from eval.passes import TargetPasses
from eval.sampling import Context, Sampling
from eval.tree import DraftTree
from eval.verify import HostVerified, Verified, verify
from heads.errors import HeadwayError
from heads.target import States, Target


@dataclass(frozen=True)
class Settings:
    """How to decode. `stop_ids` None takes the target's own; `seed` fixes every draw (row r of a call uses seed + r).

    `min_new_tokens`: a stop token has probability 0 before so many tokens are out. `ends` tells of a row's ids, prompt
    and output, whether the last one completes it (a stop string); it is asked after every token. `rule` is a name of
    eval.verify.RULES; None takes the lossless rule that fits the draft.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] | None = None
    ends: Callable[[list[int]], bool] | None = None
    seed: int = 0
    rule: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise HeadwayError(f"max_new_tokens {self.max_new_tokens}: must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise HeadwayError(
                f"min_new_tokens {self.min_new_tokens}: must be 0 to max_new_tokens {self.max_new_tokens}"
            )


@dataclass
class _Row:
    """One sequence on the host: its ids so far (prompt and output) and how it ended."""

    prompt: list[int]
    ids: list[int]
    stop: str | None = None

    @property
    def emitted(self) -> int:
        return len(self.ids) - len(self.prompt)

    def take(self, tokens: Sequence[int], settings: Settings, stop_ids: Sequence[int]) -> int:
        """Append tokens up to one that ends the row (stop token, stop string, length limit); returns how many."""
        for count, token in enumerate(tokens, start=1):
            self.ids.append(token)
            if token in stop_ids:
                self.stop = "eos"
            elif settings.ends is not None and settings.ends(self.ids):
                self.stop = "stop"
            elif self.emitted >= settings.max_new_tokens:
                self.stop = "length"
            if self.stop:
                return count
        return len(tokens)


def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    settings: Settings | None = None,
    listener: Callable[[int, list[int]], None] | None = None,
    controller: LengthController | None = None,
) -> Ledger:
    """Decode a batch of prompts (token ids) and return the ledger: outputs in the order of the prompts, and rounds.

    `listener` is told each row's number and new tokens as soon as they are certain. `controller` sets each round's draft
    length; it goes on learning from call to call.
    Raises HeadwayError for an empty prompt, a target that cannot roll back, prompts too long for the target, or logits
    that are not finite (naming row and position).
    """
    return _Decoding(target, drafter, prompts, settings or Settings(), listener, controller).run()


class _Decoding:
    """The state of one `decode` call."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        listener: Callable[[int, list[int]], None] | None,
        controller: LengthController | None,
    ) -> None:
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise HeadwayError(f"prompt {number} has no tokens; give at least one (a BOS token, or a chat prompt)")
        self.target, self.drafter, self.settings = target, drafter, settings
        self.listener, self.controller = listener, controller
        self.rows = [_Row(list(prompt), list(prompt)) for prompt in prompts]
        self.stop_ids = target.eos_ids if settings.stop_ids is None else settings.stop_ids
        tokens = max(len(prompt) for prompt in prompts) + settings.max_new_tokens
        self.passes = TargetPasses(target, len(prompts), tokens, drafter.taps, drafter.most_drafts)
        self.chooser = SeededChooser([settings.seed + row for row in range(len(prompts))], target.device)
        self.clock = Clock(target.device)
        self.ledger = Ledger()

    def run(self) -> Ledger:
        with torch.inference_mode():
            root_B, prefill_s = self._prefill()
            while any(row.stop is None for row in self.rows):
                root_B = self._round(root_B)
        self.ledger.outputs = [
            Output(number, row.ids[len(row.prompt) :], prefill_s / len(self.rows), row.stop)
            for number, row in enumerate(self.rows)
        ]
        return self.ledger

    def _prefill(self) -> tuple[torch.Tensor, float]:
        """Commit the prompts and draw each row's first token; returns those [B] and the pass's seconds."""
        started = self.clock.now()
        self.drafter.start(len(self.rows), self.chooser, self.settings.sampling)
        self._begin()
        ids_BT, states = self.passes.prefill([row.prompt for row in self.rows])
        lengths_B = self.passes.cache.lengths_B
        last_B = lengths_B - 1
        rows_B = torch.arange(len(self.rows), device=last_B.device)
        final_B1H = states.last[rows_B, last_B][:, None]
        verified = self._verify(final_B1H, DraftTree.root_only(ids_BT[rows_B, last_B]))
        self._take(verified)
        seconds = self.clock.now() - started
        self.drafter.observe(Committed(ids_BT, states.last, states.taps, lengths_B, verified.next_B))
        return verified.next_B, seconds

    def _round(self, root_B: torch.Tensor) -> torch.Tensor:
        """Draft, verify, commit, account; returns the next root [B]."""
        live = [row.stop is None for row in self.rows]
        started = self.clock.now()
        self._begin()
        tree, asked = self._draft(root_B)
        drafted_at = self.clock.now()
        states = self.passes.verify(tree)
        verified = self._verify(states.last, tree)
        positions = [row.emitted for row in self.rows]
        kept, taken = self._take(verified)  # the round's one host synchronisation
        verified_at = self.clock.now()
        counts_B = verified.accepted_B + 1
        # a row that has ended keeps its cache length, so that it never outgrows the cache
        live_B = torch.tensor(live, device=counts_B.device)
        counts = [count + 1 if alive else 0 for count, alive in zip(kept.accepted, live, strict=True)]
        self.passes.commit(tree, verified.path_BL, counts_B * live_B, counts)
        self.drafter.observe(replace(_committed(tree, states, verified, counts_B), logits_BNV=self.logits_BNV))
        ended_at, taking_part = self.clock.now(), sum(live)
        if self.controller is not None:
            accepted = [count for count, alive in zip(kept.accepted, live, strict=True) if alive]
            self.controller.observe(len(live), asked, accepted, ended_at - started)
        share = 1 / taking_part
        for number, row in enumerate(self.rows):
            if live[number]:
                self.ledger.rounds.append(
                    Round(
                        prompt=number,
                        position=positions[number],
                        drafted=kept.drafted[number],
                        accepted=kept.accepted[number],
                        emitted=taken[number],
                        stop=row.stop,
                        draft_s=(drafted_at - started) * share,
                        verify_s=(verified_at - drafted_at) * share,
                        host_s=(ended_at - verified_at) * share,
                        rows=taking_part,
                        asked=None if self.controller is None else asked,
                        depth=tree.max_depth if tree.max_width > 1 else None,
                    )
                )
        return verified.next_B

    def _begin(self) -> None:
        """Tell the chooser how far each output is; coins are keyed by that."""
        emitted_B = torch.tensor([row.emitted for row in self.rows])
        self.emitted_B = emitted_B.to(self.target.device, non_blocking=True)
        self.chooser.begin(self.emitted_B)

    def _draft(self, root_B: torch.Tensor) -> tuple[DraftTree, int]:
        """The round's tree, and the length that was asked for: the controller's choice, or the drafter's own."""
        length = None if self.controller is None else self.controller.choose(len(self.rows))
        if length == 0:
            return DraftTree.root_only(root_B), 0
        tree = self.drafter.draft([row.ids for row in self.rows], root_B, length)
        return self.passes.fit(tree), self.drafter.depth if length is None else length

    def _verify(self, last_BNH: torch.Tensor, tree: DraftTree) -> Verified:
        sampling, device = self.settings.sampling, self.target.device
        context = None
        if sampling.needs_context:
            context = Context.of([row.ids for row in self.rows], [len(row.prompt) for row in self.rows], device)
        logits_BNV = self.logits_BNV = self.target.logits(last_BNH)
        if self.settings.min_new_tokens:
            early_BN = self.emitted_B[:, None] + tree.positions() < self.settings.min_new_tokens
            for stop in self.stop_ids:
                logits_BNV[:, :, stop] = logits_BNV[:, :, stop].masked_fill(early_BN, -torch.inf)
        return verify(logits_BNV, tree, sampling, self.chooser, context, self.settings.rule)

    def _take(self, verified: Verified) -> tuple[HostVerified, list[int]]:
        """Bring the round's result to the host and append it to the rows; returns it and each row's kept tokens."""
        live = [row.stop is None for row in self.rows]
        kept = verified.host([row.emitted for row in self.rows], live)
        taken = [0] * len(self.rows)
        for number, row in enumerate(self.rows):
            if row.stop is None:
                taken[number] = row.take(kept.emitted[number], self.settings, self.stop_ids)
                if self.listener is not None:
                    self.listener(number, row.ids[-taken[number] :])
        return kept, taken


def _committed(tree: DraftTree, states: States, verified: Verified, counts_B: torch.Tensor) -> Committed:
    path_BL = verified.path_BL.clamp(min=0)

    def on_path(all_BNH: torch.Tensor) -> torch.Tensor:
        return all_BNH.gather(1, path_BL[..., None].expand(-1, -1, all_BNH.shape[-1]))

    taps = {tap: on_path(all_BNH) for tap, all_BNH in states.taps.items()}
    return Committed(tree.tokens_BN.gather(1, path_BL), on_path(states.last), taps, counts_B, verified.next_B)
