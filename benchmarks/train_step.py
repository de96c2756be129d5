"""An EAGLE-3 training step here against a plain one: tokens a second and peak memory, the same sizes, alternating in one run.

    python benchmarks/train_step.py        # writes benchmarks/results/eagle-train_step.json, about two minutes on 2 cores

The plain step does what first comes to mind: every row at every step, one mask over all steps' keys, the logits of a text over the
whole draft vocabulary at once, all left to autograd. It runs text by text, so that it pays for no padding. Sizes are those of the
embedded target's head; states and texts are random, since neither their values nor the target matter to the time.

Shapes: X tokens of all texts, T tokens of one, S steps, Q keys of all steps so far, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from peak import Taken, measured
from results_file import RESULTS, write_result
from torch import Tensor
from torch.nn import functional as F

from heads.draft_layer import attend
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.served import served_rows
from heads.vocabulary import DraftVocabulary

SIZES: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
    "taps": (2, 15, 27),
}
STEPS, DECAY, ROUNDS = 4, 0.8, 5
SHORTEST, LONGEST, SUPERVISED = 60, 420, 0.65


class Setting:
    """A head, its target's output over the draft vocabulary, an embedding, and the texts of one step; all random."""

    def __init__(self, tokens: int, device: str) -> None:
        torch.manual_seed(0)
        vocab, draft, hidden = SIZES["vocab_size"], SIZES["draft_vocab_size"], SIZES["hidden_size"]
        self.embed_VH = torch.randn(vocab, hidden, device=device)
        vocabulary = DraftVocabulary(torch.randperm(vocab)[:draft].sort().values, vocab)
        config = Eagle3Config(**SIZES)
        self.head = Eagle3Head.from_target(config, torch.randn(vocab, hidden) / hidden**0.5, vocabulary).to(device)
        self.output_DH = self.head.lm_head.weight.detach().clone()
        self.ids_D = self.head.target_ids()
        self.texts = [text(length, vocabulary, device) for length in lengths(tokens)]
        self.tokens = sum(len(part["ids"]) for part in self.texts)

    def output(self, last: Tensor) -> Tensor:
        return last @ self.output_DH.T

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_VH[ids]


def lengths(tokens: int) -> list[int]:
    """Lengths of texts, as conversations of the demo have them, that add up to about `tokens`."""
    source, found = random.Random(0), [0]
    while sum(found) < tokens:
        found.append(source.randint(SHORTEST, LONGEST))
    return found[1:]


def text(length: int, vocabulary: DraftVocabulary, device: str) -> dict[str, Tensor]:
    """A prompt and an answer of drafted tokens."""
    hidden, prompt = SIZES["hidden_size"], round(length * (1 - SUPERVISED))
    return {
        "ids": vocabulary.ids_D[torch.randint(vocabulary.size, (length,))].to(device),
        "turn": (torch.arange(length) >= prompt).long().to(device),
        "last": torch.randn(length, hidden, device=device),
        "taps": torch.randn(length, len(SIZES["taps"]) * hidden, device=device),
    }


def our_step(setting: Setting) -> Tensor:
    """The loss by the head's training forward."""
    rows, segments, begin = [], [], 0
    for number, part in enumerate(setting.texts):
        index_P, segment_P = served_rows(part["turn"])
        rows.append(index_P + begin)
        segments.append(segment_P + number)
        begin += len(part["ids"])
    index_P = torch.cat(rows)
    found = setting.head(
        torch.cat([part["ids"] for part in setting.texts]),
        torch.tensor([len(part["ids"]) for part in setting.texts]),
        index_P,
        torch.cat(segments),
        torch.cat([part["taps"] for part in setting.texts]),
        torch.cat([part["last"] for part in setting.texts])[index_P],
        embed=setting.embed,
        output=setting.output,
        losses={"kl": 1.0},
        steps=STEPS,
    )
    weights_S = DECAY ** torch.arange(STEPS, device=found.numerators_K.device)
    return (found.numerators_K / found.counts_K * weights_S).sum()


def plain_step(setting: Setting) -> Tensor:
    """The same loss, plainly."""
    sums = [torch.zeros((), device=setting.output_DH.device) for _ in range(STEPS)]
    counts = [torch.zeros((), device=setting.output_DH.device) for _ in range(STEPS)]
    for part in setting.texts:
        hidden_STH = plain_unroll(setting.head, part["taps"], setting.embed(part["ids"]))
        law_TD = setting.output(part["last"]).softmax(-1)
        supervised_T = part["turn"] > 0
        for step, hidden_TH in enumerate(hidden_STH):
            shift = step + 1
            served_T = torch.stack([supervised_T.roll(-1 - back) for back in range(step + 2)]).all(0)
            served_T[-1 - shift :] = False
            log_q_TD = setting.head.lm_head.logits(hidden_TH).log_softmax(-1)
            divergence_T = F.kl_div(log_q_TD, law_TD.roll(-shift, 0), reduction="none").sum(-1)
            sums[step] = sums[step] + (divergence_T * served_T).sum()
            counts[step] = counts[step] + served_T.sum()
    return torch.stack([DECAY**step * sums[step] / counts[step] for step in range(STEPS)]).sum()


def plain_unroll(head: Eagle3Head, taps_TF: Tensor, embeds_TH: Tensor) -> list[Tensor]:
    """Every step's hidden states [T, H], each over the keys of all steps."""
    length, layer = len(taps_TF), head.layers[0]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=taps_TF.device).tril()
    own_TT = torch.eye(length, dtype=torch.bool, device=taps_TF.device)
    h_TH, keys, values, hidden = head.features_of(taps_TF), [], [], []
    for step in range(STEPS):
        e_TH = embeds_TH.roll(-1 - step, 0)
        turns = head.rope(torch.arange(length, device=taps_TF.device) + step, h_TH.dtype)
        x_TI = layer.attention_input(h_TH, e_TH)
        k_TGE, v_TGE = layer.self_attn.keys_values(x_TI, turns)
        keys.append(k_TGE.transpose(0, 1)[None])
        values.append(v_TGE.transpose(0, 1)[None])
        mask_TQ = torch.cat([causal_TT, *[own_TT] * step], 1)
        q_TAE = layer.self_attn.queries(x_TI, turns)
        out = attend(q_TAE[None], torch.cat(keys, 2), torch.cat(values, 2), mask_TQ[None, None])
        h_TH = layer.finish(h_TH, out[0])
        hidden.append(head.leave(h_TH)[1])
    return hidden


def train(setting: Setting, loss_of: Callable[[Setting], Tensor]) -> Tensor:
    """Forward, backward and the norm that clips; without an optimizer, which is the same for both."""
    setting.head.zero_grad()
    loss = loss_of(setting)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(setting.head.parameters(), 1.0)
    return loss.detach()


def main(tokens: int = 2048, rounds: int = ROUNDS, device: str = "cpu", out: Path = RESULTS) -> None:
    """Measure both.

    Args:
        tokens: of a step.
        rounds: steps of each kind, alternating; a further one of each warms up.
        device: cpu or cuda.
        out: folder of the result.
    """
    setting = Setting(tokens, device)
    kinds = {"ours": our_step, "plain": plain_step}
    losses = {name: float(train(setting, step)) for name, step in kinds.items()}
    taken: dict[str, list[Taken]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in sorted(kinds, reverse=bool(number % 2)):
            taken[name].append(measured(lambda name=name: train(setting, kinds[name]), device))
    figures: dict[str, Any] = {
        "sizes": SIZES | {"taps": list(SIZES["taps"]), "steps": STEPS},
        "texts": len(setting.texts),
        "tokens": setting.tokens,
        "supervised_tokens": sum(int((part["turn"] > 0).sum()) for part in setting.texts),
        "device": device,
        "threads": torch.get_num_threads(),
    }
    for name in kinds:
        seconds = [each.seconds for each in taken[name]]
        figures[name] = {
            "loss": losses[name],
            "seconds": seconds,
            "tokens_per_s": setting.tokens / statistics.median(seconds),
            "peak_mib": max(each.added_mib for each in taken[name]),
        }
        print(
            f"{name:6} {figures[name]['tokens_per_s']:8.0f} tokens/s, peak {figures[name]['peak_mib']:8.0f} MiB, loss {losses[name]:.6f}"
        )
    pairs = zip(figures["plain"]["seconds"], figures["ours"]["seconds"], strict=True)
    figures["speedup"] = statistics.median(plain / ours for plain, ours in pairs)
    figures["memory_ratio"] = figures["plain"]["peak_mib"] / figures["ours"]["peak_mib"]
    print(f"{figures['speedup']:.2f} times as fast, {figures['memory_ratio']:.1f} times less memory")
    name = "eagle-train_step" if device == "cpu" else f"eagle-train_step-{device}"
    print(write_result(name, figures, out))


if __name__ == "__main__":
    auto_cli(main)
