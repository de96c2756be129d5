"""Replay equals decoding: every round's accepted length, for chains and trees, greedy and sampled text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_prep.store import StoredConversation
from eval.decode import Settings, decode
from eval.drafters import Committed, Drafter
from eval.drafters.eagle import EagleDrafter, EagleTreeDrafter
from eval.drafters.eagle_passes import EaglePasses
from eval.drafters.medusa import MedusaDrafter, MedusaTreeDrafter
from eval.drafters.none import NoDrafter
from eval.ledger import Ledger
from eval.replay import Replayed, chain, replay, text_ranks, walk
from eval.replay_steps import steps_over, stored_text
from eval.sampling import Sampling
from eval.tree import TreeShape
from heads import load_head
from heads.checkpoint import Head
from heads.eagle import EagleHead
from heads.errors import HeadwayError
from heads.medusa import MedusaConfig, MedusaHead
from heads.target import Target
from heads.vocabulary import DraftVocabulary
from tests.eval.eagle_heads import KINDS, SMALL, PlainForward, functions, make_head, random_prompts, small_target, teach

STEPS = 4
WIDE = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 1, 0), (2, 0, 1), (0, 1, 0, 0)])
SAMPLED = Sampling(temperature=1.0)
LENGTHS = ((1, 30), (7, 1), (19, 24), (4, 2))  # of a prompt, and of the answer to it


def medusa(target: Target, hydra: bool) -> MedusaHead:
    """Random heads that lack token 1."""
    ids_D = torch.tensor([0, *range(2, SMALL)])
    config = MedusaConfig(target.hidden_size, SMALL, len(ids_D), STEPS, hydra=hydra)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = MedusaHead.from_target(config, target.ends.lm_head_weight, DraftVocabulary(ids_D, SMALL))
        with torch.no_grad():
            for parameter in head.blocks.parameters():
                parameter.normal_(0, 0.5)
    return head.to(target.dtype).eval()


def make(kind: str, target: Target) -> Head:
    if kind in ("medusa", "hydra"):
        return medusa(target, kind == "hydra")
    layers = 2 if kind == "deep" else 1
    return make_head("eagle3.1" if kind == "deep" else kind, target, num_layers=layers)


def taught(kind: str, written: Written) -> Head:
    head = make(kind, written.target)
    teach(head, written.target, written.stored, STEPS)
    return head


def drafter(head: Head, target: Target, steps: int) -> Drafter:
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, steps, target.embed)
    assert isinstance(head, EagleHead)
    return EagleDrafter(head, functions(target), steps, sampled=False)


def tree_drafter(head: Head, target: Target) -> Drafter:
    if isinstance(head, MedusaHead):
        return MedusaTreeDrafter(head, WIDE)
    assert isinstance(head, EagleHead)
    return EagleTreeDrafter(head, functions(target), WIDE)


class Written:
    """Conversations of two turns whose answers the target wrote by our loop without a draft, as a store keeps them."""

    def __init__(self, target: Target, sampling: Sampling) -> None:
        self.target, self.sampling = target, sampling
        self.prompts: list[list[int]] = []
        self.lengths: list[int] = []
        self.stored: list[StoredConversation] = []
        for number, lengths in enumerate(zip(LENGTHS[::2], LENGTHS[1::2], strict=True)):
            ids: list[int] = []
            turns: list[int] = []
            for turn, (asked, answered) in enumerate(lengths, 1):
                ids = [*ids, *random_prompts(SMALL, (asked,), seed=10 * number + turn)[0]]
                self.prompts.append(list(ids))
                self.lengths.append(answered)
                settings = Settings(answered, sampling=sampling, stop_ids=(), seed=len(self.prompts) - 1)
                answer = decode(target, NoDrafter(), self.prompts[-1:], settings).outputs[0].ids
                turns += [0] * (len(ids) - len(turns)) + [turn] * answered
                ids += answer
            self.stored.append(stored_text(target, f"c{number}", ids, turns))

    def again(self, drafter: Drafter) -> Ledger:
        """All turns in one batch, each under the seed that it was written with; the texts go on past the stored ones."""
        settings = Settings(max(self.lengths), sampling=self.sampling, stop_ids=(), seed=0)
        return decode(self.target, drafter, self.prompts, settings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small_target(tmp_path_factory.mktemp("replay"), dtype="float32")


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def written(target: Target, request: pytest.FixtureRequest) -> Written:
    return Written(target, Sampling() if request.param == "greedy" else SAMPLED)


def check_rounds(written: Written, made: Ledger, drafter: Drafter) -> None:
    """Every round against a real decode of the same turns."""
    made.check()
    decoded = written.again(drafter)
    for number, length in enumerate(written.lengths):
        text = made.outputs[number].ids
        assert len(text) == length
        assert text == decoded.outputs[number].ids[:length], "the text is the same with any draft"
        real = [row for row in decoded.rounds if row.prompt == number and row.position < length]
        rounds = [row for row in made.rounds if row.prompt == number]
        for mine, its in zip(rounds, real, strict=True):
            left = length - its.position  # drafts past the text's end are not in it
            assert mine.position == its.position
            assert (mine.accepted, mine.emitted) == (min(its.accepted, left), min(its.accepted + 1, left))
            assert mine.drafted == its.drafted or mine.accepted == left


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "eagle3.1"])
def test_every_round_of_a_replayed_chain_is_the_decodes(written: Written, kind: str, tmp_path: Path) -> None:
    """Chains of 1 to STEPS from one pass over the text; the head once as made and once saved and loaded."""
    target = written.target
    head = taught(kind, written)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    texts = [text_ranks(loaded, target.ends, stored, STEPS, candidates=1) for stored in written.stored]
    for steps in range(1, STEPS + 1):
        made = walk(texts, chain(steps))
        assert made.rounds == replay(head, target.ends, written.stored, steps).ledger.rounds
        check_rounds(written, made, drafter(head, target, steps))
    assert len({row.accepted for row in made.rounds}) >= 3, "drafts that always end alike prove little"


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_every_round_of_a_replayed_tree_is_the_decodes(written: Written, kind: str) -> None:
    head = taught(kind, written)
    made = replay(head, written.target.ends, written.stored, shape=WIDE).ledger
    check_rounds(written, made, tree_drafter(head, written.target))
    assert len({row.accepted for row in made.rounds}) >= 3


def test_cut_at_the_limit(written: Written) -> None:
    """`limit` is the decode's max_new_tokens."""
    head = taught("eagle3", written)
    texts = [text_ranks(head, written.target.ends, stored, STEPS) for stored in written.stored]
    whole, cut = walk(texts, chain(STEPS)), walk(texts, chain(STEPS), limit=9)
    cut.check()
    for number, output in enumerate(cut.outputs):
        assert output.ids == whole.outputs[number].ids[:9]
        settings = Settings(len(output.ids), sampling=written.sampling, stop_ids=(), seed=number)
        decoded = decode(written.target, drafter(head, written.target, STEPS), [written.prompts[number]], settings)
        rounds = [(row.position, row.emitted) for row in cut.rounds if row.prompt == number]
        assert rounds == [(row.position, row.emitted) for row in decoded.rounds]


def test_positions_end(target: Target) -> None:
    """cases.md 27: a head of 24 positions drafts no further in replay than in decoding."""
    written = Written(target, Sampling())
    head = make_head("eagle3", target, max_position_embeddings=24)
    teach(head, target, written.stored, STEPS)
    made = replay(head, target.ends, written.stored, STEPS).ledger
    check_rounds(written, made, drafter(head, target, STEPS))
    assert [row.drafted for row in made.rounds if row.prompt == 2][-1] == 0
    assert written.lengths[2] == 24


# --- the laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "deep"])
def test_drafts_logits_are_those_of_training(target: Target, kind: str) -> None:
    """Depth d of drafting, over the cache and without one, is step d of the training-time test, in batches of 1 and 3.

    The text is committed in ragged pieces of 1 to 4 tokens; behind each, the draft is led along the text's own tokens.
    """
    head = make(kind, target)
    assert isinstance(head, EagleHead)
    texts = random_prompts(SMALL, (26, 22, 31), seed=5)
    trained, alone = [_led(head, target, ids) for ids in texts], PlainForward(head, target)
    for rows in ([0], [0, 1, 2]):
        passes = EaglePasses(head, functions(target), len(rows), torch.device("cpu"), compiled=False)
        done = [0] * len(rows)
        for turn in range(6):
            piece = [5 if turn == 0 else 1 + (turn + row) % 4 for row in rows]
            passes.observe(_piece(target, head, [texts[row] for row in rows], done, piece))
            done = [start + more for start, more in zip(done, piece, strict=True)]
            with torch.no_grad():
                features, hidden = passes.follow(
                    [texts[row][: end + 1] for row, end in zip(rows, done, strict=True)], 3
                )
                for step in range(3):
                    logits_BD = passes.logits(hidden)
                    for place, (row, end) in enumerate(zip(rows, done, strict=True)):
                        assert_equal(logits_BD[place], trained[row][step][end - 1])
                        if turn == 5 and kind != "deep":
                            plain_D = alone(texts[row][: end + 1], texts[row][end + 1 : end + 1 + step])
                            assert_equal(logits_BD[place], plain_D)
                    token_B1 = torch.tensor([[texts[row][end + 1 + step]] for row, end in zip(rows, done, strict=True)])
                    features, hidden = (
                        part[:, 0] for part in passes.step(features.view(len(rows), 1, -1), token_B1, step + 1)
                    )


def assert_equal(found_D: torch.Tensor, wanted_D: torch.Tensor) -> None:
    """To 1e-5 of the largest."""
    assert (found_D - wanted_D).abs().max() <= 1e-5 * wanted_D.abs().max()


def _led(head: EagleHead, target: Target, ids: list[int]) -> list[torch.Tensor]:
    """For steps 0 to 2 the training-time test's logits [T, D] of every row, the whole text being the assistant's."""
    states = target.states(torch.tensor([ids]), taps=head.taps)
    taps = {tap: found[0] for tap, found in states.taps.items()}
    none_T = torch.zeros(len(ids))
    stored = StoredConversation("x", torch.tensor(ids), torch.ones(len(ids)), states.last[0], taps, none_T, none_T)
    with torch.no_grad():
        rows, made = steps_over(head, target.ends, stored, 3)
        return [made.logits(step, (rows.labels_PS[:, step] >= 0).nonzero()[:, 0]) for step in range(3)]


def _piece(target: Target, head: EagleHead, texts: list[list[int]], done: list[int], piece: list[int]) -> Committed:
    """The next tokens of each text, as a pass of the target commits them."""
    width = max(piece)
    tokens, lasts, taps, roots = [], [], {tap: [] for tap in head.taps}, []
    for ids, start, count in zip(texts, done, piece, strict=True):
        states = target.states(torch.tensor([ids]), taps=head.taps)
        tokens.append(torch.tensor([*ids[start : start + count], *[0] * (width - count)]))
        lasts.append(states.last[0, start : start + width])
        for tap, found in states.taps.items():
            taps[tap].append(found[0, start : start + width])
        roots.append(ids[start + count])
    stacked = {tap: torch.stack(found) for tap, found in taps.items()}
    return Committed(torch.stack(tokens), torch.stack(lasts), stacked, torch.tensor(piece), torch.tensor(roots))


@pytest.mark.parametrize("kind", ["hydra", "eagle"])
def test_figures_equal_brute_force(target: Target, kind: str) -> None:
    """Overlap where drafts were made, from laws over all tokens; tau and acceptance by hand from a decode's rounds."""
    written = Written(target, Sampling())
    head = taught(kind, written)
    assert isinstance(head, MedusaHead | EagleHead)
    known = head.target_ids()
    halves = [replay(head, target.ends, [stored], STEPS) for stored in written.stored]
    made = Replayed.joined(halves)
    assert made.figures() == replay(head, target.ends, written.stored, STEPS).figures()
    figures, rounds = made.figures(), made.ledger.rounds
    assert figures["replayed_tau"] == sum(row.emitted for row in rounds) / len(rounds)
    assert (figures["replayed_rounds"], figures["replayed_tokens"]) == (
        len(rounds),
        sum(LENGTHS[n][1] for n in range(4)) - 4,
    )
    sums, counts, rights = [0.0] * STEPS, [0] * STEPS, [0] * STEPS
    for row in rounds:
        ids = [*written.prompts[row.prompt], *made.ledger.outputs[row.prompt].ids]
        end = len(written.prompts[row.prompt]) + row.position  # the text with its root
        for step in range(min(row.accepted + 1, STEPS, len(ids) - end)):
            with torch.no_grad():
                logits_D = _draft_logits(head, target, ids[:end], ids[end : end + step])
            law_V = torch.zeros(SMALL, dtype=target.dtype)
            law_V[known] = logits_D.softmax(-1)
            target_V = target.logits(target.states(torch.tensor([ids[: end + step]])).last[0, -1]).softmax(-1)
            sums[step] += float(torch.minimum(law_V, target_V).sum())
            counts[step] += 1
            rights[step] += int(known[logits_D.argmax()]) == ids[end + step]
    assert made.rows_S == counts
    drafted = [step for step in range(STEPS) if counts[step]]
    for step in drafted:
        assert figures["overlap"][step] == pytest.approx(sums[step] / counts[step], rel=1e-4)
        assert figures["replayed_acceptance"][step] == pytest.approx(rights[step] / counts[step])
    assert len(drafted) >= 3


def _draft_logits(head: MedusaHead | EagleHead, target: Target, ids: list[int], drafts: list[int]) -> torch.Tensor:
    if isinstance(head, EagleHead):
        return PlainForward(head, target)(ids, drafts)
    last_1H = target.states(torch.tensor([ids[:-1]])).last[0, -1:]
    seen = [target.embed(torch.tensor([token])) for token in [ids[-1], *drafts]]
    seen = [found / found.square().mean(-1, keepdim=True).add(torch.finfo(found.dtype).eps).sqrt() for found in seen]
    return head.lm_head.head_logits(len(drafts), head.blocks[len(drafts)](last_1H, seen))[0]


def test_bad_requests(target: Target) -> None:
    written, head = Written(target, Sampling()), make("medusa", target)
    with pytest.raises(HeadwayError, match="replay of 5 steps: this head has 1 to 4"):
        replay(head, target.ends, written.stored, 5)
    with pytest.raises(HeadwayError, match="Hydra heads draft a chain"):
        replay(make("hydra", target), target.ends, written.stored, shape=WIDE)
    with pytest.raises(HeadwayError, match="give the number of steps"):
        replay(make("eagle", target), target.ends, written.stored)
    with pytest.raises(HeadwayError, match="tree of depth 4: the ranks are of 2 steps"):
        walk([text_ranks(head, target.ends, written.stored[0], 2)], WIDE)
