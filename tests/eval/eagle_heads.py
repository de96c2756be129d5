"""Random EAGLE heads for tiny targets. On a vocabulary of a few tokens their drafts are right often enough by chance."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data_prep.store import StoredConversation
from eval.drafters.eagle_passes import TargetFunctions
from eval.replay_steps import steps_over
from heads.checkpoint import Head
from heads.draft_layer import layer_settings
from heads.eagle import Eagle1Config, Eagle1Head, EagleHead
from heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from heads.target import Target
from heads.vocabulary import DraftVocabulary
from tests.conftest import save_tiny_target

SMALL = 4
KINDS = ("eagle", "eagle3", "eagle3.1")


def small_target(folder: Path, seed: int = 0, dtype: str = "float64", **config: Any) -> Target:
    """A random Llama over SMALL tokens, none of which ends a text."""
    words = {f"w{number}": number for number in range(SMALL)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    size = {"vocab_size": SMALL, "initializer_range": 0.4, "num_hidden_layers": 4} | config
    return Target.load(str(save_tiny_target(folder / f"small-{seed}", tokenizer, seed, **size)), dtype, "cpu")


def make_head(kind: str, target: Target, seed: int = 0, left_out: int = 1, **config: Any) -> EagleHead:
    """A random head of KINDS in the target's dtype; EAGLE-3 drafts all but the `left_out` smallest ids but one."""
    settings = layer_settings(target.config) | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "eagle":
            head: EagleHead = Eagle1Head(Eagle1Config(**settings))
        else:
            new = kind == "eagle3.1"
            ids_D = torch.tensor([0, *range(1 + left_out, target.vocab_size)])
            taps = default_taps(target.num_layers)
            sizes = {"draft_vocab_size": len(ids_D), "taps": taps, "fc_norm": new, "norm_output": new}
            vocabulary = DraftVocabulary(ids_D, target.vocab_size)
            head = Eagle3Head.from_target(Eagle3Config(**settings, **sizes), target.ends.lm_head_weight, vocabulary)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if "norm" not in name and name != "lm_head.weight":
                    parameter.normal_(0, 0.1 if kind == "eagle" else 0.2)  # EAGLE-1 has no norm on its way round
    head.manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    return head.to(target.dtype).eval()


def functions(target: Target) -> TargetFunctions:
    """What a head borrows of its target."""
    return TargetFunctions(target.embed, target.logits)


def random_prompts(vocab_size: int, lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    """Prompts of the given lengths."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def teach(head: Head, target: Target, texts: list[StoredConversation], steps: int, times: int = 15) -> None:
    """A little training, so that drafts of every depth are right now and then."""
    optimizer = torch.optim.Adam([weight for weight in head.parameters() if weight.requires_grad], lr=0.02)
    for _ in range(times):
        losses = []
        for stored in texts:
            rows, made = steps_over(head, target.ends, stored, steps)
            for step in range(steps):
                inside_R = (rows.draft_PS[:, step] >= 0).nonzero()[:, 0]
                labels_R = rows.draft_PS[inside_R, step]
                losses.append(torch.nn.functional.cross_entropy(made.logits(step, inside_R), labels_R))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


class PlainForward:
    """A head's logits behind a text without a cache: one pass over the whole text for each draft."""

    def __init__(self, head: EagleHead, target: Target) -> None:
        self.head, self.target = head, target

    def __call__(self, ids: list[int], drafts: list[int]) -> torch.Tensor:
        """[D]: after the text `ids`, the root its last token, and the drafts.

        Rows of true states, then those that the earlier passes made up, each the last row of a pass over all before it.
        """
        states = self.target.states(torch.tensor([ids[:-1]]), taps=self.head.taps)
        features_1TH = self.head.features(states.last, states.taps)
        nexts = ids[1:]
        for token in drafts:
            out_1TH, _ = self._run(features_1TH, nexts)
            features_1TH, nexts = torch.cat([features_1TH, out_1TH[:, -1:]], 1), [*nexts, token]
        return self.head.logits(self._run(features_1TH, nexts)[1], self.target.logits)[0, -1]

    def _run(self, features_1TH: torch.Tensor, nexts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        embeds = self.target.embed(torch.tensor([nexts]))
        return self.head.run(features_1TH, embeds, torch.arange(len(nexts))[None])
