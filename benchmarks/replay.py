"""Replay against decoding on the embedded target: every round of 64 held-out answers, fp32.

    python benchmarks/replay.py --heads '["artifacts/demo/medusa", "artifacts/demo/eagle3"]'   # writes benchmarks/results/eagle-replay.json

The answers are written by the decode loop without a draft, greedily and sampled at temperature 1. Each head then replays them,
in one pass for chains of all lengths and a static tree, and really decodes them; every round is compared. What a round
accepts may differ only where fp32 rounds two nearly equal draft logits apart: such rounds are listed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import auto_cli
from results_file import write_result

from data_prep.conversations import SAMPLES, prompt_ids, read_conversations, split_heldout
from data_prep.store import StoredConversation
from eval.decode import Settings, decode
from eval.drafters import Drafter
from eval.drafters.eagle import EagleDrafter, EagleTreeDrafter
from eval.drafters.eagle_passes import TargetFunctions
from eval.drafters.medusa import MedusaDrafter, MedusaTreeDrafter
from eval.drafters.none import NoDrafter
from eval.ledger import Ledger
from eval.metrics import mean_accepted_length
from eval.replay import TextRanks, chain, text_ranks, walk
from eval.replay_steps import stored_text
from eval.sampling import Sampling
from eval.tree import TreeShape
from heads import load_head
from heads.checkpoint import Head
from heads.eagle import EagleHead
from heads.medusa import MedusaHead
from heads.target import DEFAULT_TARGET, Target

PROMPTS, TOKENS, ROWS, STEPS = 64, 64, 16, 4
TREE = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)])
Law = Literal["greedy", "temperature 1"]
LAWS: dict[Law, Sampling] = {"greedy": Sampling(), "temperature 1": Sampling(temperature=1.0)}
LISTED = 20  # differing rounds that a result names


@dataclass(frozen=True)
class Answers:
    """Prompts, how they are answered, and the answers as a store would keep them."""

    prompts: list[list[int]]
    sampling: Sampling
    ids: list[list[int]]
    stored: list[StoredConversation]

    @staticmethod
    def written(target: Target, prompts: list[list[int]], sampling: Sampling, tokens: int) -> Answers:
        """By the decode loop without a draft."""
        ledger, _ = decoded(target, NoDrafter(), prompts, sampling, tokens)
        ids = [output.ids for output in ledger.outputs]
        kept = [stored(target, prompt, answer) for prompt, answer in zip(prompts, ids, strict=True)]
        return Answers(prompts, sampling, ids, kept)


def stored(target: Target, prompt: list[int], answer: list[int]) -> StoredConversation:
    """A prompt and its answer as a store keeps them."""
    return stored_text(target, "answer", [*prompt, *answer], [0] * len(prompt) + [1] * len(answer))


def decoded(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], sampling: Sampling, tokens: int
) -> tuple[Ledger, float]:
    """All prompts in batches, each under a seed of its own; returns the ledger and the seconds."""
    ledger, begun = Ledger(), time.monotonic()
    for first in range(0, len(prompts), ROWS):
        part = list(prompts[first : first + ROWS])
        made = decode(target, drafter, part, Settings(tokens, sampling=sampling, seed=first))
        ledger.absorb(made, range(first, first + len(part)))
    return ledger, time.monotonic() - begun


def compare(
    target: Target, head: Head, shape: TreeShape, answers: Answers, ranks: list[TextRanks], real: Ledger
) -> tuple[Ledger, dict[str, Any]]:
    """The replay of what was really decoded, and how many of its rounds are other ones.

    Where fp32 rounds a law of the verification pass to the other side of a coin, the answer is another text than the one
    written without a draft; then the replay is of that text.
    """
    made, different, others = Ledger(), [], 0
    for number, answer in enumerate(answers.ids):
        ids = next(output.ids for output in real.outputs if output.prompt == number)
        text = ranks[number]
        if ids != answer:
            others += 1
            text = text_ranks(head, target.ends, stored(target, answers.prompts[number], ids), shape.max_depth)
        part = walk([text], shape)
        made.absorb(part, [number])
        theirs = [row for row in real.rounds if row.prompt == number]
        for mine, its in zip(part.rounds, theirs, strict=False):
            accepted = min(its.accepted, len(ids) - its.position)  # drafts past the cut are in no text
            if (mine.position, mine.accepted, mine.emitted) != (its.position, accepted, its.emitted):
                named = {"answer": number, "position": its.position, "replayed": mine.accepted, "decoded": accepted}
                different.append(named)
                break  # what follows started elsewhere
    return made, {
        "rounds": len(real.rounds),
        "answers_that_differ": len(different),
        "first_differences": different[:LISTED],
        "other_texts": others,
    }


def drafters(head: Head, target: Target, steps: int) -> list[tuple[str, TreeShape, Drafter]]:
    """Chains of all lengths, and a static tree where the head has one; none of them sampled."""
    lengths = range(1, steps + 1)
    if isinstance(head, MedusaHead):
        made: list[tuple[str, TreeShape, Drafter]] = [
            (f"chain {length}", chain(length), MedusaDrafter(head, length, target.embed)) for length in lengths
        ]
        if not head.config.hydra and head.config.num_heads >= TREE.max_depth:
            made.append(("tree", TREE, MedusaTreeDrafter(head, TREE)))
        return made
    assert isinstance(head, EagleHead)
    functions = TargetFunctions(target.embed, target.logits)
    made = [
        (f"chain {length}", chain(length), EagleDrafter(head, functions, length, sampled=False)) for length in lengths
    ]
    return [*made, ("tree", TREE, EagleTreeDrafter(head, functions, TREE))]


def ranks_of(head: Head, target: Target, answers: Answers, steps: int) -> tuple[list[TextRanks], float]:
    """The head over all answers, and the seconds."""
    begun = time.monotonic()
    return [text_ranks(head, target.ends, stored, steps) for stored in answers.stored], time.monotonic() - begun


def measure(
    heads: list[Path],
    target: str = DEFAULT_TARGET,
    count: int = PROMPTS,
    tokens: int = TOKENS,
    steps: int = STEPS,
    laws: Sequence[Law] = tuple(LAWS),
    result: str = "eagle-replay",
) -> None:
    """Compare every round, and write the result after each run.

    Args:
        heads: folders of the heads
        target: the target they were trained for
        count: held-out conversations
        tokens: of each answer at most
        steps: the longest chain; a Medusa head with fewer heads drafts as many as it has
        laws: of the text, greedy, temperature 1, or both
        result: name of the file in benchmarks/results/
    """
    model = Target.load(target, "float32")
    _, heldout = split_heldout(read_conversations(SAMPLES), PROMPTS)
    prompts = [prompt_ids(model.tokenizer, conversation.messages[:1]) for conversation in heldout[:count]]
    figures: dict[str, Any] = {"prompts": count, "tokens": tokens, "dtype": "float32", "runs": []}
    for law in laws:
        sampling = LAWS[law]
        answers = Answers.written(model, prompts, sampling, tokens)
        for folder in heads:
            head = load_head(folder, device=model.device, dtype=model.dtype)
            longest = min(steps, head.config.num_heads) if isinstance(head, MedusaHead) else steps
            runs = drafters(head, model, longest)
            ranks, replay_s = ranks_of(head, model, answers, max(shape.max_depth for _, shape, _ in runs))
            for draft, shape, drafter in runs:
                real, decode_s = decoded(model, drafter, prompts, sampling, tokens)
                made, found = compare(model, head, shape, answers, ranks, real)
                run = {"head": str(folder), "text": law, "draft": draft, **found}
                run |= {
                    "tau_replayed": mean_accepted_length(made).micro,
                    "tau_decoded": mean_accepted_length(real).micro,
                }
                figures["runs"].append(run | {"replay_s": replay_s, "decode_s": decode_s})
                print(figures["runs"][-1], flush=True)
                write_result(result, figures)  # what is done stays, however the rest ends


if __name__ == "__main__":
    auto_cli(measure, as_positional=False)
