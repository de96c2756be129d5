"""Medusa heads against brute force over every row, and a task with a known answer.

Shapes as in heads/medusa.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heads import losses
from heads.errors import HeadwayError
from heads.losses import HeadOutput
from heads.medusa import MedusaConfig, MedusaHead, pack
from heads.served import served_labels
from heads.vocabulary import DraftVocabulary

H, V, D, K = 8, 30, 17, 4


def make_head(draft: int | None = D, output: Any = "own", seed: int = 0, heads: int = K) -> MedusaHead:
    generator = torch.Generator().manual_seed(seed)
    config = MedusaConfig(H, V, draft, heads, 2, output)
    ids_D = torch.randperm(V, generator=generator)[: draft or V].sort().values
    head = MedusaHead.from_target(config, torch.randn(V, H, generator=generator), DraftVocabulary(ids_D, V))
    with torch.no_grad():
        for parameter in head.blocks.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head.double()


Conversation = tuple[Tensor, Tensor, Tensor]


def conversations(count: int = 4, seed: int = 0) -> list[Conversation]:
    """Random (last_TH, ids_T, turn_T): turns of 1 to 7 tokens, turns that touch, holes in a turn, a turn at either end."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        turns = [[0, 0, 1, 1, 1, 1, 1, 1, 0, 2, 0, 0, 3, 3, 3], [1, 1, 1, 2, 2, 2, 2, 2, 0, 2, 2, 2, 0], [0, 0, 0]]
        turn_T = torch.tensor(turns[number % 3])
        length = len(turn_T)
        made.append(
            (
                torch.randn(length, H, generator=generator, dtype=torch.float64),
                torch.randint(V, (length,), generator=generator),
                turn_T,
            )
        )
    return made


def packed(parts: list[Conversation]) -> dict[str, Tensor]:
    """Several conversations in one pack; segments numbered on."""
    lasts, nexts, segments, start = [], [], [], 0
    for part in parts:
        last_PH, next_P, segment_P = pack(*part)
        lasts.append(last_PH)
        nexts.append(next_P)
        segments.append(segment_P + start)
        start += int(segment_P.max()) + 1 if len(segment_P) else 0
    return {"last_PH": torch.cat(lasts), "next_P": torch.cat(nexts), "segment_P": torch.cat(segments)}


def served(turn_T: Tensor, t: int, k: int) -> bool:
    """By the definition: tokens t+1 .. t+2+k supervised, in one turn."""
    turns = turn_T[t + 1 : t + 3 + k].tolist()
    return len(turns) == k + 2 and turns[0] > 0 and len(set(turns)) == 1


def brute_force(
    head: MedusaHead, parts: list[Conversation], teacher_VH: Tensor | None = None, soft: float = 0.0
) -> tuple[list[Tensor], dict[str, list[int]]]:
    """Loss sums and counts of every head, row by row, from `draft_logits` alone."""
    figures = {name: [0] * K for name in ("counts", "served", "correct", "reached", "accepted")}
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(K)]
    ids_D = [int(i + (head.d2t[i] if head.config.mapped else 0)) for i in range(head.config.output_size)]
    for last_TH, ids_T, turn_T in parts:
        for t in range(len(ids_T)):
            logits_KD = head.draft_logits(last_TH[t : t + 1])[0]
            prefix_right = True
            for k in range(K):
                if not served(turn_T, t, k):
                    continue
                label = int(ids_T[t + 2 + k])
                figures["served"][k] += 1
                figures["reached"][k] += prefix_right
                right = ids_D[int(logits_KD[k].argmax())] == label
                figures["correct"][k] += right
                prefix_right = prefix_right and right
                figures["accepted"][k] += prefix_right
                if label not in ids_D:
                    continue
                figures["counts"][k] += 1
                sums[k] = sums[k] + (1 - soft) * -F.log_softmax(logits_KD[k], -1)[ids_D.index(label)]
                if teacher_VH is not None:
                    law_D = (last_TH[t + 1 + k] @ teacher_VH.T)[ids_D].softmax(-1)
                    sums[k] = sums[k] + soft * F.kl_div(logits_KD[k].log_softmax(-1), law_D, reduction="sum")
    return sums, figures


def check(output: HeadOutput, sums: list[Tensor], figures: dict[str, list[int]]) -> None:
    torch.testing.assert_close(output.numerators_K.double(), torch.stack(sums), rtol=1e-5, atol=1e-5)
    for name, values in figures.items():
        assert getattr(output, f"{name}_K").tolist() == values, name


@pytest.mark.parametrize(("draft", "output"), [(D, "own"), (None, "own"), (D, "shared")])
@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 3 * D, 2**24])
def test_loss_figures_and_gradients_equal_brute_force(
    draft: int | None, output: Any, soft: float, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the chunk; cases 1, 2 and 4."""
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", chunk)
    head, parts = make_head(draft, output), conversations()
    head.lm_head.weight.requires_grad_(True)
    teacher_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ids_D = head.target_ids()
    weights_K = torch.tensor([1.0, 0.8, 0.64, 0.512], dtype=torch.float64)

    shares = {name: share for name, share in (("ce", 1 - soft), ("kl", soft)) if share}
    result = head(**packed(parts), teacher=lambda last: last @ teacher_VH[ids_D].T, losses=shares)
    (result.numerators_K * weights_K).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    sums, figures = brute_force(head, parts, teacher_VH, soft)
    (torch.stack(sums) * weights_K).sum().backward()

    check(result, sums, figures)
    assert min(figures["counts"]) > 0
    assert figures["counts"] == figures["served"] if draft is None else figures["counts"] != figures["served"]
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 1e-3, f"{name}: untrained"
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_without_gradient_the_figures_are_the_same():
    head, parts = make_head(), conversations()
    with torch.no_grad():
        check(head(**packed(parts)), *brute_force(head, parts))


def test_sums_do_not_depend_on_the_split():
    """One batch, or one per conversation, in any order (case 2)."""
    head, parts = make_head(), conversations(6)
    whole = head(**packed(parts))
    pieces = [head(**packed([part])) for part in reversed(parts)]
    for name in HeadOutput._fields:
        total = torch.stack([getattr(piece, name) for piece in pieces]).sum(0)
        torch.testing.assert_close(getattr(whole, name), total, rtol=1e-6, atol=1e-6)


def test_gradient_lies_exactly_on_the_served_rows():
    """Of each head apart, with respect to every position's state (case 1)."""
    head = make_head(draft=None)
    for k in range(K):
        parts = [(last.requires_grad_(True), ids, turn) for last, ids, turn in conversations()]
        head(**packed(parts)).numerators_K[k].backward()
        for last_TH, ids_T, turn_T in parts:
            touched = (last_TH.grad.abs().sum(-1) > 0).tolist() if last_TH.grad is not None else [False] * len(ids_T)
            assert touched == [served(turn_T, t, k) for t in range(len(ids_T))]


def test_gradient_lies_exactly_on_the_counted_draft_logits(monkeypatch: pytest.MonkeyPatch):
    """The same at the logits themselves: rows that reach the output matrix are the served ones, and no other."""
    head, parts = make_head(), conversations()
    seen: list[Tensor] = []
    forward = head.lm_head.forward

    def spy(rows_K: Any, *rest: Any) -> Any:
        seen.extend(rows.x_RH for rows in rows_K)
        return forward(rows_K, *rest)

    monkeypatch.setattr(head.lm_head, "forward", spy)
    head(**packed(parts))
    in_draft = set(head.target_ids().tolist())
    for k in range(K):
        expected = [
            head.blocks[k](last_TH[t])
            for last_TH, ids_T, turn_T in parts
            for t in range(len(ids_T))
            if served(turn_T, t, k) and int(ids_T[t + 2 + k]) in in_draft
        ]
        torch.testing.assert_close(seen[k], torch.stack(expected))


def test_a_batch_without_a_served_row_has_zero_loss_and_zero_gradients():
    head = make_head()
    result = head(**packed([conversations(3)[2]]))
    assert result.numerators_K.tolist() == [0.0] * K
    assert result.served_K.tolist() == [0] * K
    result.numerators_K.sum().backward()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_a_second_backward_is_refused():
    total = make_head()(**packed(conversations())).numerators_K.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        total.backward()


def test_starts_as_the_target_restricted_to_the_draft_vocabulary():
    """Residual blocks are the identity, outputs the target's rows: every head starts as the target's own."""
    generator = torch.Generator().manual_seed(3)
    weight_VH, last_RH = torch.randn(V, H, generator=generator), torch.randn(5, H, generator=generator)
    ids_D = torch.tensor(sorted({1, 4, 5, 9, 16, 28}))
    for output in ("own", "shared"):
        head = MedusaHead.from_target(MedusaConfig(H, V, 6, K, 2, output), weight_VH, DraftVocabulary(ids_D, V))
        expected_RD = (last_RH @ weight_VH.T)[:, ids_D]
        for k in range(K):
            torch.testing.assert_close(head.draft_logits(last_RH)[:, k], expected_RD)
        ids_RK = head.draft_ids(last_RH)
        assert ids_RK.shape == (5, K)
        assert ids_RK.tolist() == [[int(i)] * K for i in ids_D[expected_RD.argmax(-1)]]


def test_blocks_are_modules_of_their_own():
    head = make_head()
    assert len({id(layer) for block in head.blocks for layer in block.layers}) == K * 2
    assert len({layer.weight.data_ptr() for block in head.blocks for layer in block.layers}) == K * 2


def test_served_labels_on_a_written_out_example():
    """Two turns of 4 and 2 tokens: the packed rows are those BEFORE each supervised token."""
    ids_T, turn_T = torch.arange(10, 19), torch.tensor([0, 0, 1, 1, 1, 1, 0, 2, 2])
    last_PH, next_P, segment_P = pack(torch.arange(9.0).unsqueeze(1), ids_T, turn_T)
    assert last_PH.squeeze(1).tolist() == [1, 2, 3, 4, 6, 7]
    assert next_P.tolist() == [12, 13, 14, 15, 17, 18]
    assert segment_P.tolist() == [0, 0, 0, 0, 1, 1]
    assert served_labels(next_P, segment_P, 3).tolist() == [
        [13, 14, 15],
        [14, 15, -1],
        [15, -1, -1],
        [-1, -1, -1],
        [18, -1, -1],
        [-1, -1, -1],
    ]


def test_head_k_learns_token_t_plus_2_plus_k():
    """A cyclic text whose states name the current token: head k must learn the token k + 2 further on, and nothing else."""
    cycle, generator = 7, torch.Generator().manual_seed(0)
    config = MedusaConfig(hidden_size=cycle, vocab_size=cycle, draft_vocab_size=None, num_heads=3)
    vocabulary = DraftVocabulary(torch.arange(cycle), cycle)
    head = MedusaHead.from_target(config, torch.randn(cycle, cycle, generator=generator), vocabulary)
    ids_T = torch.arange(60) % cycle
    rows = dict(
        zip(("last_PH", "next_P", "segment_P"), pack(torch.eye(cycle)[ids_T], ids_T, ids_T * 0 + 1), strict=True)
    )
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(80):
        optimizer.zero_grad()
        result = head(**rows)
        result.numerators_K.sum().backward()
        for block in head.blocks:
            assert all(parameter.grad.abs().sum() > 0 for parameter in block.parameters())
        optimizer.step()
    assert result.correct_K.tolist() == result.served_K.tolist() == [58, 57, 56]
    ids_RK = head.draft_ids(torch.eye(cycle))
    assert ids_RK.tolist() == [[(token + 2 + k) % cycle for k in range(3)] for token in range(cycle)]


def test_low_precision_sums_stay_close():
    """bf16 autocast: sums in float32 over bf16 products."""
    head, parts = make_head().float(), [(last.float(), ids, turn) for last, ids, turn in conversations(8)]
    exact = head(**packed(parts))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = head(**packed(parts))
    assert rough.numerators_K.dtype == torch.float32
    torch.testing.assert_close(rough.numerators_K, exact.numerators_K, rtol=0.02, atol=0.0)
    rough.numerators_K.sum().backward()
    low = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()
    exact.numerators_K.sum().backward()
    for found, parameter in zip(low, head.parameters(), strict=True):
        assert F.cosine_similarity(found.flatten(), parameter.grad.flatten(), dim=0) > 0.999
        assert math.isclose(found.norm(), parameter.grad.norm(), rel_tol=0.03)


def test_refuses_a_vocabulary_of_another_size():
    with pytest.raises(HeadwayError, match="5 of 30 tokens do not fit a head with 17 of 30"):
        MedusaHead.from_target(MedusaConfig(H, V, D), torch.zeros(V, H), DraftVocabulary(torch.arange(5), V))


def hydra_head(output: Any = "shared") -> tuple[MedusaHead, torch.nn.Embedding]:
    """A random Hydra head over 20 of 24 tokens, and an embedding, in float64."""
    torch.manual_seed(3)
    config = MedusaConfig(hidden_size=8, vocab_size=24, draft_vocab_size=20, num_heads=3, output=output, hydra=True)
    vocabulary = DraftVocabulary(torch.arange(4, 24), 24)
    head = MedusaHead.from_target(config, torch.randn(24, 8), vocabulary).double()
    for parameter in head.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head, torch.nn.Embedding(24, 8).double().requires_grad_(False)


def by_hand(head: MedusaHead, embed: torch.nn.Embedding, state_H: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits [D] of head len(tokens) - 1 after the root and drafts `tokens`, written out for one row."""
    k = len(tokens) - 1
    layer = head.blocks[k].layers[0]
    unit = [embed.weight[token] / embed.weight[token].square().mean().sqrt() for token in tokens]
    inner = layer.weight @ torch.cat([state_H, *unit]) + layer.bias
    weight_DH = head.lm_head.weight if head.lm_head.weight.dim() == 2 else head.lm_head.weight[k]
    return weight_DH @ (state_H + inner * torch.sigmoid(inner))


@pytest.mark.parametrize("output", ["own", "shared"])
def test_hydra_heads_draft_from_the_tokens_before(output: str) -> None:
    head, embed = hydra_head(output=output)
    last_BH, root_B = torch.randn(4, 8, dtype=torch.float64), torch.tensor([3, 9, 14, 23])
    ids_BK = head.draft_ids(last_BH, root_B, embed)
    for row in range(4):
        tokens = [int(root_B[row])]
        for _ in range(3):
            draft = int(by_hand(head, embed, last_BH[row], tokens).argmax())
            tokens.append(draft + int(head.d2t[draft]))
        assert ids_BK[row].tolist() == tokens[1:]
    assert head.draft_ids(last_BH, root_B, embed, 2).tolist() == ids_BK[:, :2].tolist()
    other_B = (root_B + 1) % 24
    assert head.draft_ids(last_BH, other_B, embed).tolist() != ids_BK.tolist(), "the root is not looked at"


def test_hydra_training_equals_its_drafting() -> None:
    """Teacher forcing on a text gives each head, row by row, the loss of the logits it drafts with there."""
    head, embed = hydra_head()
    ids_T = torch.randint(0, 24, (11,))
    turn_T = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 2, 2, 2])
    last_TH = torch.randn(11, 8, dtype=torch.float64)
    output = head(*pack(last_TH, ids_T, turn_T), embed=embed)
    draft_ids_V = head.draft_ids_of()
    for k in range(3):
        total, count = 0.0, 0
        for t in range(11):
            span = turn_T[t + 1 : t + 3 + k]
            if len(span) < k + 2 or span[0] == 0 or not bool((span == span[0]).all()):
                continue
            label = int(draft_ids_V[ids_T[t + 2 + k]])
            if label < 0:
                continue
            logits_D = by_hand(head, embed, last_TH[t], ids_T[t + 1 : t + 2 + k].tolist())
            total, count = total - float(logits_D.detach().log_softmax(0)[label]), count + 1
        assert int(output.counts_K[k]) == count
        assert float(output.numerators_K[k]) == pytest.approx(total, rel=1e-6)


def test_hydra_heads_ask_for_what_they_need() -> None:
    head, _ = hydra_head()
    last_BH = torch.randn(2, 8, dtype=torch.float64)
    with pytest.raises(HeadwayError, match="give both"):
        head.draft_ids(last_BH)
    with pytest.raises(HeadwayError, match="use draft_ids"):
        head.draft_logits(last_BH)
    with pytest.raises(HeadwayError, match="embeddings; none were given"):
        head(last_BH, torch.tensor([1, 2]), torch.tensor([0, 0]))
