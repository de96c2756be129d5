"""EAGLE heads: training against the plainest way to write it, and against the passes that decode.

Shapes as in heads/eagle.py, T tokens of a text.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Gemma3TextConfig, GPT2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads import load_head
from heads.draft_layer import Rope, layer_settings
from heads.eagle import Eagle1Config, Eagle1Head, EagleHead
from heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from heads.errors import HeadwayError
from heads.served import served_labels, served_rows
from heads.unroll import schedule
from heads.vocabulary import DraftVocabulary
from tests.heads.plain_eagle import PlainUnroll

H, V, D, S = 16, 30, 21, 3
KINDS = ("eagle", "eagle-2-layers", "eagle3", "eagle3-full", "eagle3.1-2-layers", "eagle3-norms-elsewhere")
generator = torch.Generator()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


OUTPUT_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
EMBED_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def embed(ids: Tensor) -> Tensor:
    return EMBED_VH[ids]


def make_head(kind: str, seed: int = 0) -> EagleHead:
    """A random double-precision head: 4 heads of size 6 over 2 key-value heads, taps 1, 2 and 5."""
    torch.manual_seed(seed)
    generator.manual_seed(seed)
    layers = 2 if "2-layers" in kind else 1
    shape: dict[str, Any] = {"hidden_size": H, "vocab_size": V, "num_layers": layers, "intermediate_size": 24}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    if kind.startswith("eagle3"):
        new = kind.startswith("eagle3.1")
        ids_D = torch.arange(V) if "full" in kind else torch.randperm(V, generator=generator)[:D].sort().values
        draft = None if "full" in kind else D
        switches = {"norm_before_residual": True, "norm_before_fc": True} if "elsewhere" in kind else {}
        switches |= {"fc_norm": new, "norm_output": new}
        config = Eagle3Config(**shape, draft_vocab_size=draft, taps=(1, 2, 5), **switches)
        head: EagleHead = Eagle3Head.from_target(config, OUTPUT_VH, DraftVocabulary(ids_D, V))
    else:
        head = Eagle1Head(Eagle1Config(**shape))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            spread = 0.3 if "norm" in name else 0.2
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return head.double()


Text = dict[str, Tensor]


def texts(seed: int = 0) -> list[Text]:
    """Texts with turns of 1 to 7 tokens, turns that touch, a hole in a turn, turns at either end, and one that is served nowhere."""
    turns = [
        [0, 0, 1, 1, 1, 1, 1, 1, 0, 2, 0, 0, 3, 3, 3],
        [1, 1, 1, 2, 2, 2, 2, 2, 0, 2, 2, 2, 0],
        [0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1],
    ]
    generator.manual_seed(seed)
    made = []
    for turn in turns:
        ids_T = torch.randint(V, (len(turn),), generator=generator)
        made.append(
            {"ids": ids_T, "turn": torch.tensor(turn), "last": random(len(turn), H), "taps": random(len(turn), 3 * H)}
        )
    return made


def batch(head: EagleHead, parts: list[Text]) -> dict[str, Tensor]:
    """The head's forward arguments for several texts."""
    rows, segments, begin, count = [], [], 0, 0
    for part in parts:
        index_P, segment_P = served_rows(part["turn"])
        rows.append(index_P + begin)
        segments.append(segment_P + count)
        begin, count = begin + len(part["ids"]), count + len(index_P)
    index_P, last_XH = torch.cat(rows), torch.cat([part["last"] for part in parts])
    return {
        "ids_X": torch.cat([part["ids"] for part in parts]),
        "lengths_B": torch.tensor([len(part["ids"]) for part in parts]),
        "index_P": index_P,
        "segment_P": torch.cat(segments),
        "states_XF": torch.cat([part["taps"] for part in parts]) if head.taps else last_XH,
        "last_PH": last_XH[index_P],
    }


def output_of(head: EagleHead) -> Any:
    """The target's output function over the head's draft vocabulary; a soft cap makes it more than a product."""
    ids_D = head.target_ids()
    return lambda last: 3 * torch.tanh(last.double() @ OUTPUT_VH[ids_D].T / 3)


def losses_of(head: EagleHead) -> dict[str, float]:
    return {"kl": 1.0} if head.taps else {"smooth_l1": 1.0, "kl": 0.1}


def forward(head: EagleHead, parts: list[Text], losses: dict[str, float] | None = None, **more: Any) -> Any:
    losses = losses or losses_of(head)
    return head(**batch(head, parts), embed=embed, output=output_of(head), losses=losses, steps=S, **more)


def served(turn_T: Tensor, t: int, step: int) -> bool:
    """By the definition: tokens t+1 .. t+2+step supervised, in one turn."""
    turns = turn_T[t + 1 : t + 3 + step].tolist()
    return len(turns) == step + 2 and turns[0] > 0 and len(set(turns)) == 1


def plain(head: EagleHead, parts: list[Text]) -> tuple[list[Tensor], dict[str, list[int]]]:
    """Loss sums and figures of every step, row by row."""
    figures = {name: [0] * S for name in ("counts", "served", "correct", "reached", "accepted")}
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(S)]
    ids, output = head.target_ids().tolist(), output_of(head)
    for part in parts:
        states_TF = part["taps"] if head.taps else part["last"]
        hidden: list[Tensor] = []

        def keep(last: Tensor, hidden: list[Tensor] = hidden) -> Tensor:
            hidden.append(last)
            return output(last)

        logits_STD = PlainUnroll(head)(states_TF, embed(part["ids"]), S, keep)
        for t in range(len(part["ids"])):
            prefix = True
            for step in range(S):
                if not served(part["turn"], t, step):
                    continue
                label = int(part["ids"][t + 2 + step])
                right = ids[int(logits_STD[step, t].argmax())] == label
                figures["served"][step] += 1
                figures["correct"][step] += right
                figures["reached"][step] += prefix
                prefix = prefix and right
                figures["accepted"][step] += prefix
                if label not in ids:
                    continue
                figures["counts"][step] += 1
                law_D = output(part["last"][t + 1 + step]).softmax(-1)
                loss = F.kl_div(logits_STD[step, t].log_softmax(-1), law_D, reduction="sum")
                if not head.taps:
                    loss = 0.1 * loss + F.smooth_l1_loss(hidden[step][t], part["last"][t + 1 + step])
                sums[step] = sums[step] + loss
    return sums, figures


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


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_rope_is_the_targets(kind: str):
    """Against transformers' own module, from settings in the new and in the old style."""
    new = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(ROPES[kind])
    )
    positions = torch.tensor([[0, 3, 200], [7, 255, 1]])
    expected = LlamaRotaryEmbedding(new)(torch.zeros(1), positions)
    scaling = {name: value for name, value in ROPES[kind].items() if name not in ("rope_theta", "rope_type")}
    old = SimpleNamespace(**{name: getattr(new, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")})
    old.max_position_embeddings, old.rope_theta = 256, ROPES[kind]["rope_theta"]
    old.rope_scaling = {"type": kind} | scaling if scaling else None
    for config in (new, old):
        found = Rope(Eagle1Config(**layer_settings(config)))(positions, torch.float32)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_layer_is_made_of_the_targets_settings():
    gemma = Gemma3TextConfig(
        num_hidden_layers=6, head_dim=64, hidden_size=96, num_attention_heads=3, num_key_value_heads=1
    )
    found = layer_settings(gemma)
    assert (found["head_dim"], found["hidden_act"]) == (64, "gelu_pytorch_tanh")
    assert found["rope_parameters"]["rope_theta"] == gemma.rope_parameters["full_attention"]["rope_theta"]
    gpt2 = layer_settings(GPT2Config(n_embd=48, n_head=4, n_positions=99))
    assert (gpt2["head_dim"], gpt2["intermediate_size"], gpt2["max_position_embeddings"]) == (12, 192, 99)
    assert gpt2["hidden_act"] == "gelu_new"
    for settings in (found, gpt2):
        Eagle3Head(Eagle3Config(**settings, taps=(1,)))


def test_taps_are_distinct_layers_of_any_target():
    """Case 18: methods.md's formula wherever it gives three ascending layers."""
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    for layers in range(1, 40):
        taps = default_taps(layers)
        assert len(set(taps)) == min(3, layers)
        assert all(0 <= tap < layers for tap in taps)
        if layers >= 7:
            assert taps == (2, layers // 2, layers - 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_is_the_same_head(kind: str, tmp_path: Path):
    head = make_head(kind)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    assert type(loaded) is type(head)
    assert loaded.config == head.config
    left, right = head.state_dict(), loaded.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    a, b = forward(head.eval(), texts()), forward(loaded, texts())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(a, b, strict=True))


def test_configurations_that_cannot_be_are_refused():
    shape: dict[str, Any] = {"hidden_size": 8, "vocab_size": 9, "intermediate_size": 8, "head_dim": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for kind, change, message in [
        (Eagle3Config, {"taps": (1, 1)}, "taps"),
        (Eagle3Config, {"taps": ()}, "taps"),
        (Eagle3Config, {"taps": (1,), "draft_vocab_size": 10}, "draft_vocab_size"),
        (Eagle1Config, {"draft_vocab_size": 5}, "EAGLE-1"),
        (Eagle1Config, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (Eagle1Config, {"head_dim": 3}, "head_dim"),
        (Eagle1Config, {"hidden_act": "square"}, "hidden_act"),
        (Eagle1Config, {"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        (Eagle1Config, {"num_layers": 0}, "num_layers"),
    ]:
        with pytest.raises(HeadwayError, match=message):
            kind(**(shape | change))
    with pytest.raises(ValueError, match="output function"):
        make_head("eagle").logits(random(1, H))
