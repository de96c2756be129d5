"""Chi-square through the real decode loop: do its tokens have the target's law?

A tiny random target of 8 tokens is decoded many times, the draws being rows of a batch, each with its own seed. The law
of its first tokens is known exactly from one forward pass over every prefix, so the counts of the joint outcomes can be
tested against it. What enumeration proves of one round on paper laws, this shows of the whole loop: cache, masks,
positions, contexts, coins from seeds, rounds after rounds.

Shape suffixes: B rows, K drafts, S prefixes, V vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from scipy import stats
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.chooser import Chooser
from eval.contenders import HEAD_DRAFTERS
from eval.decode import Settings, decode
from eval.drafters import Committed, Drafter
from eval.drafters.lookup import LookupDrafter
from eval.experiments import CHAIN, SMALL_TREE
from eval.law import Dense, Law, dense
from eval.sampling import Context, Sampling, target_law
from eval.tree import DraftTree, TreeShape, draw_siblings
from eval.verify import TargetLaws
from heads.checkpoint import Head
from heads.target import Target

VOCAB, PROMPT = 8, (3, 1, 4, 1, 5)
TOKENS = 4  # of each output: the prefill's own and three more
BATCH = 1000
LEAST_EXPECTED = 5.0  # the usual condition on a cell
SIGNIFICANT = 1e-4
FAULT_DRAWS = 20_000  # enough to notice laws that are off by 0.01

SETTINGS: dict[str, Sampling] = {
    "temperature 1": Sampling(temperature=1.0),
    "temperature 0.7": Sampling(temperature=0.7),
    "top-p 0.9": Sampling(temperature=1.0, top_p=0.9),
    "top-k 5": Sampling(temperature=1.0, top_k=5),
    "min-p 0.1": Sampling(temperature=1.0, min_p=0.1),
    "penalties": Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2),
}


def tiny_target(folder: Path, seed: int = 0) -> Target:
    """A random Llama of two layers over 8 tokens, saved to `folder` and loaded like any target, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                initializer_range=0.3,  # wide enough that laws differ from prefix to prefix,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


class BigramDrafter:
    """A sampling draft model: the target's law after the last token alone, at temperature 1.

    Drafts a chain, or a static tree with siblings drawn i.i.d. or without replacement.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, shape: TreeShape, replacement: bool = True) -> None:
        self.name = "sampled"
        self.shape, self.replacement = shape, replacement
        self.most_drafts, self.depth = len(shape.paths), shape.max_depth
        with torch.inference_mode():
            last_V1H = target.states(torch.arange(target.vocab_size)[:, None]).last
            self.law_VV = target.logits(last_V1H[:, 0]).softmax(-1)

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Keep the chooser to draw with."""
        self.chooser = chooser

    def observe(self, committed: Committed) -> None:
        """Nothing to learn."""

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """The shape, filled by sampling."""
        parents, tokens, used = self.shape.parents, [root_B], [0] * (self.shape.max_depth + 1)
        laws, live_B = [], torch.ones_like(root_B, dtype=torch.bool)
        for node, depth in enumerate([0, *self.shape.depths]):
            laws.append(self.law_VV[tokens[node]])
            width = parents.count(node)
            if width:
                drawn_BW = draw_siblings(laws[-1], width, self.replacement, self.chooser, depth, used[depth], live_B)
                tokens.extend(drawn_BW.unbind(1))
            used[depth] += width
        return DraftTree.static(root_B, torch.stack(tokens[1:], 1), self.shape, torch.stack(laws, 1), self.replacement)


@dataclass(frozen=True)
class Subject:
    """A drafter under the rule that verifies it."""

    name: str
    drafter: Drafter
    rule: str | None = None


def like(head: Head, target: Target, seed: int) -> Head:
    """A random head of the same kind and size in heads, for another target's sizes and its whole vocabulary."""
    taps = tuple(range(target.num_layers))[: len(getattr(head.config, "taps", ()))]
    sizes = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": None,
        "taps": taps,
    }
    names = {each.name for each in fields(head.config)}
    config = replace(head.config, **{name: size for name, size in sizes.items() if name in names})
    tiny = type(head)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return tiny.eval()


def subjects(head: Head, target: Target, seed: int) -> list[tuple[Subject, Sequence[str]]]:
    """Drafters of the chi-square tests, each with the names of its settings: the head's kind and a chain get all."""
    every, some = tuple(SETTINGS), ("temperature 0.7", "penalties")
    kind = head.config.kind
    return [
        (Subject(kind, HEAD_DRAFTERS[kind](like(head, target, seed), target, None)), every),
        (Subject("sampled chain", BigramDrafter(target, CHAIN)), every),
        (Subject("sampled chain, block", BigramDrafter(target, CHAIN), "block"), some),
        (Subject("tree of i.i.d. siblings", BigramDrafter(target, SMALL_TREE)), some),
        (Subject("tree without replacement", BigramDrafter(target, SMALL_TREE, replacement=False)), some),
        (Subject("lookup", LookupDrafter(3, 2)), some),
    ]


def exact_law(target: Target, sampling: Sampling, tokens: int = TOKENS) -> Tensor:
    """Probability of each of the V ** `tokens` first outputs, float64, the first token varying slowest."""
    joint_S = torch.ones(1, dtype=torch.float64)
    for size in range(tokens):
        outputs = [list(ids) for ids in product(range(VOCAB), repeat=size)]
        rows = [[*PROMPT, *ids] for ids in outputs]
        with torch.inference_mode():
            logits_SV = target.logits(target.states(torch.tensor(rows)).last[:, -1])
        law, _ = target_law(logits_SV.double(), sampling, Context.of(rows, [len(PROMPT)] * len(rows)))
        joint_S = (joint_S[:, None] * dense(law, VOCAB, torch.float64)).flatten()
    return joint_S


def counts(target: Target, subject: Subject, sampling: Sampling, draws: int, seed: int, tokens: int = TOKENS) -> Tensor:
    """How often each first output came out of `draws` decodes, laid out as in `exact_law`."""
    found_S = torch.zeros(VOCAB**tokens, dtype=torch.float64)
    weights = VOCAB ** torch.arange(tokens - 1, -1, -1)
    for first in range(0, draws, BATCH):
        rows = min(BATCH, draws - first)
        settings = Settings(max_new_tokens=tokens, sampling=sampling, stop_ids=(), seed=seed + first, rule=subject.rule)
        ledger = decode(target, subject.drafter, [PROMPT] * rows, settings)
        ids_BT = torch.tensor([output.ids for output in ledger.outputs])
        found_S += torch.bincount((ids_BT * weights).sum(1), minlength=len(found_S))
    return found_S


def p_value(found_S: Tensor, law_S: Tensor) -> float:
    """Pearson's chi-square; cells expected fewer than 5 times are pooled, an outcome of probability 0 gives 0."""
    if bool((found_S[law_S < 1e-12] > 0).any()):
        return 0.0
    order_S = law_S.argsort(descending=True)
    expected_S, found_S = law_S[order_S] * found_S.sum(), found_S[order_S]
    large = int((expected_S >= LEAST_EXPECTED).sum())
    cells = [(float(o), float(e)) for o, e in zip(found_S[:large], expected_S[:large], strict=True)]
    rest = (float(found_S[large:].sum()), float(expected_S[large:].sum()))
    if rest[1] >= LEAST_EXPECTED:
        cells.append(rest)
    elif cells:
        cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1)) if len(cells) > 1 else 1.0


def test(target: Target, subject: Subject, sampling: Sampling, draws: int, seed: int) -> float:
    """The p-value of `draws` decodes."""
    return p_value(counts(target, subject, sampling, draws, seed), exact_law(target, sampling))


@contextmanager
def planted_fault(token: int, variation: float) -> Iterator[None]:
    """Every law that verification asks for is off by `variation`: moved to `token` from the others in proportion."""

    def at(laws: TargetLaws, node_B: Tensor) -> tuple[Law, Tensor]:
        law, finite_B = shipped(laws, node_B)
        probs_BV = dense(law, laws.vocab_size)
        here_B1 = probs_BV[:, token : token + 1]
        moved_BV = probs_BV * (1 - variation / (1 - here_B1))
        moved_BV[:, token : token + 1] = here_B1 + variation
        return Dense(moved_BV), finite_B

    shipped = TargetLaws.at
    with patch.object(TargetLaws, "at", at):
        yield
