"""EAGLE heads: training against the plainest way to write it, and against the passes that decode.

Shapes as in heads/eagle.py, T tokens of a text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from heads.eagle import Eagle1Head, EagleHead
from heads.eagle3 import Eagle3Head
from heads.served import served_labels, served_rows
from heads.unroll import schedule
from tests.heads.eagle_batches import (
    KINDS,
    H,
    S,
    V,
    batch,
    embed,
    forward,
    generator,
    losses_of,
    make_head,
    output_of,
    plain,
    random,
    served,
    texts,
)


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_the_plainest_way_gradients_too(kind: str):
    """Cases 1, 2 and 4: loss, figures and the gradient of every parameter, from every step."""
    head, parts = make_head(kind), texts()
    weights_S = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    result = forward(head, parts)
    (result.numerators_K * weights_S).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    sums, figures = plain(head, parts)
    (torch.stack(sums) * weights_S).sum().backward()
    torch.testing.assert_close(result.numerators_K.double(), torch.stack(sums), rtol=1e-5, atol=1e-5)
    for name, values in figures.items():
        assert getattr(result, f"{name}_K").tolist() == values, name
    assert (
        figures["counts"] == figures["served"]
        if head.config.output_size == V
        else figures["counts"] != figures["served"]
    )
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 1e-4, f"{name}: untrained"
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_loss_reaches_exactly_the_served_rows(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Case 1: the rows whose draft logits have a gradient, by hand for each step; a token that cannot be drafted has none."""
    head, parts = make_head(kind), texts()
    reached: list[set[tuple[int, int]]] = [set() for _ in range(S)]
    arguments = batch(head, parts)
    loss = type(head).loss

    def watched(self: EagleHead, rows_S: Any, *others: Any) -> Any:
        for step, rows in enumerate(rows_S):
            tokens = arguments["index_P"][rows.slots_R - 1 - step].tolist()

            def note(gradient: Tensor, step: int = step, tokens: list[int] = tokens) -> None:
                reached[step] |= {token for token, row in zip(tokens, gradient, strict=True) if row.abs().max() > 1e-9}

            rows.x_RH.register_hook(note)
        return loss(self, rows_S, *others)

    monkeypatch.setattr(type(head), "loss", watched)
    forward(head, parts).numerators_K.sum().backward()
    drafted, begin = set(head.target_ids().tolist()), 0
    expected: list[set[int]] = [set() for _ in range(S)]
    for part in parts:
        for t in range(len(part["ids"])):
            for step in range(S):
                if served(part["turn"], t, step) and int(part["ids"][t + 2 + step]) in drafted:
                    expected[step].add(begin + t)
        begin += len(part["ids"])
    assert reached == expected
    assert all(expected)
    # the row before an answer's first token is the first: it predicts the second one, from the first
    assert 1 in expected[0] or int(parts[0]["ids"][3]) not in drafted
    assert not expected[0] & {0, 6, 7, 9}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_depends_on_neither_split_nor_order_nor_neighbours(kind: str):
    """Case 2, to 1e-6: one batch, one text a batch, another order, and more prompt before a text that does not change it."""
    head, parts = make_head(kind), texts()
    whole = forward(head, parts)
    gradient = torch.autograd.grad(whole.numerators_K.sum(), list(head.layers.parameters()))
    single = [forward(head, [part]) for part in parts]
    turned = forward(head, parts[::-1])
    for field in whole._fields:
        expected = getattr(whole, field)
        torch.testing.assert_close(sum(getattr(one, field) for one in single), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(getattr(turned, field), expected, rtol=1e-6, atol=1e-6)
    pieces = [torch.autograd.grad(one.numerators_K.sum(), list(head.layers.parameters())) for one in single]
    for ours, *shares in zip(gradient, *pieces, strict=True):
        torch.testing.assert_close(ours, sum(shares), rtol=1e-5, atol=1e-6)


def test_nothing_to_serve_is_a_zero_that_every_parameter_takes_part_in():
    """Case 5: a batch without a row, and one without a text."""
    for kind in KINDS:
        head = make_head(kind)
        empty = {name: tensor[:0] for name, tensor in batch(head, texts()).items()}
        for arguments in (batch(head, texts()[2:3]), empty):
            head.zero_grad()
            output = output_of(head)
            result = head(**arguments, embed=embed, output=output, losses=losses_of(head), steps=S)
            result.numerators_K.sum().backward()
            assert all(not field.any() for field in result)
            for name, parameter in head.named_parameters():
                assert parameter.grad is not None, f"{kind}: {name}"
                assert not parameter.grad.any(), f"{kind}: {name}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_passes_of_decoding_give_the_logits_of_training(kind: str, rows: int):
    """Row t at step j = the draft of depth j from row t: `run` over a cache of true states, then over its own output."""
    head, length, at = make_head(kind).eval(), 9, 5
    generator.manual_seed(rows)
    ids_BT = torch.randint(V, (rows, length + S + 1), generator=generator)
    last_BTH, taps = random(rows, length, H), {tap: random(rows, length, H) for tap in (1, 2, 5)}
    turn = torch.ones(length + S + 1, dtype=torch.int64)
    index_P, segment_P = served_rows(turn)
    output = output_of(head)
    for row in range(rows):
        states_TF = torch.cat([taps[tap][row] for tap in head.taps], -1) if head.taps else last_BTH[row]
        states_XF = F.pad(states_TF, (0, 0, 0, S + 1))  # of the tokens after row `at` nothing may be seen
        next_P = ids_BT[row][index_P + 1]
        plan = schedule([length + S + 1], index_P, served_labels(next_P, segment_P, S))
        with torch.no_grad():
            hidden_S = head.unroll(head.features_of(states_XF), embed(ids_BT[row]), plan)
        trained_S = [
            head.logits(hidden_RH[plan.steps[step].tokens_R.tolist().index(at)], output)
            for step, hidden_RH in enumerate(hidden_S)
        ]
        cached_S = decode_logits(head, last_BTH, taps, ids_BT, at)
        for trained_D, cached_BD in zip(trained_S, cached_S, strict=True):
            torch.testing.assert_close(cached_BD[row], trained_D, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def decode_logits(head: EagleHead, last_BTH: Tensor, taps: dict[int, Tensor], ids_BT: Tensor, at: int) -> list[Tensor]:
    """[B, D] for each depth, drafting the known tokens behind row `at`."""
    rows, known, cache = len(ids_BT), at + 1, DynamicCache()
    features_BTH = head.features(last_BTH, taps)[:, :known]
    causal = torch.ones(known, known, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    positions_BT = torch.arange(known).expand(rows, -1)
    fed, hidden = head.run(features_BTH, embed(ids_BT[:, 1 : known + 1]), positions_BT, causal, cache)
    found = [head.logits(hidden[:, -1], output_of(head))]
    for depth in range(1, S):
        everything = torch.ones(rows, 1, 1, known + depth, dtype=torch.bool)
        position_B1 = torch.full((rows, 1), at + depth)
        fed, hidden = head.run(fed[:, -1:], embed(ids_BT[:, known + depth, None]), position_B1, everything, cache)
        found.append(head.logits(hidden[:, -1], output_of(head)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_starts_at_the_targets_output(kind: str):
    """Whatever the token after it: the deepest state it reads, normed as the target does it, through the output matrix."""
    head, eps = make_head(kind), 1e-5
    scale_H, last_BNH, taps = random(H), random(1, 5, H), {tap: random(1, 5, H) for tap in (1, 2, 5)}
    head.start_at_target(scale_H)
    features_BNH = head.features(last_BNH, taps)
    _, hidden_BNH = head.run(features_BNH, random(1, 5, H), torch.arange(5).expand(1, -1))
    if isinstance(head, Eagle1Head):
        torch.testing.assert_close(hidden_BNH, last_BNH)
        return
    assert isinstance(head, Eagle3Head)
    state_BNH = taps[5]
    if head.config.fc_norm:
        state_BNH = F.rms_norm(state_BNH, (H,), head.fc_norm[2].weight, eps)
    if head.config.norm_before_fc:
        beside = torch.cat([taps[tap] for tap in (1, 2, 5)], -1)
        state_BNH = F.rms_norm(beside, (3 * H,), head.input_norm.weight, eps)[..., -H:]
    if head.config.norm_before_residual:
        state_BNH = F.rms_norm(state_BNH, (H,), head.layers[0].hidden_norm.weight, eps)
    wanted = F.rms_norm(state_BNH, (H,), scale_H, eps) @ head.lm_head.weight.T
    torch.testing.assert_close(head.logits(hidden_BNH), wanted)


def test_run_without_a_mask_is_causal_and_a_cache_needs_one():
    head = make_head("eagle3").eval()
    features, embeds, positions = random(2, 6, H), random(2, 6, H), torch.arange(6).expand(2, -1)
    whole = head.run(features, embeds, positions)
    part = head.run(features[:, :4], embeds[:, :4], positions[:, :4])
    for all_six, four in zip(whole, part, strict=True):
        torch.testing.assert_close(all_six[:, :4], four)
    with pytest.raises(ValueError, match="mask"):
        head.run(features, embeds, positions, None, DynamicCache())


def test_noise_is_uniform_on_the_features_and_in_training_alone(monkeypatch: pytest.MonkeyPatch):
    head, parts, seen = make_head("eagle"), texts(), []
    unroll = Eagle1Head.unroll

    def watched(self: EagleHead, features_XH: Tensor, *others: Any) -> Any:
        seen.append(features_XH.detach())
        return unroll(self, features_XH, *others)

    monkeypatch.setattr(Eagle1Head, "unroll", watched)
    forward(head, parts, noise=0.1)
    noise = seen[0] - torch.cat([part["last"] for part in parts])
    assert 0.099 < noise.max() <= 0.1
    assert -0.1 <= noise.min() < -0.099
    assert abs(noise.mean()) < 0.01
    assert noise.var() == pytest.approx(0.1**2 / 3, rel=0.1)
    forward(head.eval(), parts, noise=0.1)
    assert torch.equal(seen[1], torch.cat([part["last"] for part in parts]))


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_is_near(kind: str):
    """bf16 products under autocast, gradients in float32: within bf16's rounding of the same pass in float32."""
    head, parts = make_head(kind, 2).float(), texts(2)
    found = []
    for mixed in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            result = forward(head, parts)
        result.numerators_K.sum().backward()
        gradients = [parameter.grad.flatten() for parameter in head.parameters()]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        found.append((result.numerators_K.detach(), torch.cat(gradients)))
    (exact, exact_gradient), (near, near_gradient) = found
    assert not torch.equal(exact, near)
    torch.testing.assert_close(near, exact, rtol=2e-2, atol=2e-2)
    assert (near_gradient - exact_gradient).norm() < 0.05 * exact_gradient.norm()
