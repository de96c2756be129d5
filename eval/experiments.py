"""The experiments of the proof: every rule on every kind of draft it is for, small enough to enumerate.

Shape suffixes: R cases, S prefixes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from eval.enumeration import Cases, Experiment
from eval.sampling import Sampling
from eval.tree import TreeShape

CHAIN = TreeShape.of([(0,), (0, 0), (0, 0, 0)])
WIDE = TreeShape.of([(0,), (1,), (2,)])
TREE = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
SMALL_TREE = TreeShape.of([(0,), (1,), (0, 0), (1, 0)])
DEEP_TREE = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
BUSHY_TREE = TreeShape.of([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1)])

MATCH_TREE = Experiment("match, deterministic tree", "match", "top_k", TREE, vocab=4)
MATCH_SMALL_TREE = Experiment("match, small deterministic tree", "match", "top_k", SMALL_TREE, vocab=4)
REJECTION_TREE = Experiment("rejection, deterministic tree", "rejection", "top_k", TREE, vocab=4)
SAMPLED_CHAIN = Experiment("rejection, sampled chain", "rejection", "iid", CHAIN, vocab=4)
BLOCK_CHAIN = Experiment("block, sampled chain", "block", "iid", CHAIN, vocab=4)
IID_WIDE = Experiment("rejection, three i.i.d. siblings", "rejection", "iid", WIDE, vocab=4)
IID_TREE = Experiment("rejection, small i.i.d. tree", "rejection", "iid", SMALL_TREE, vocab=3)
ONCE_WIDE = Experiment("rejection, three siblings without replacement", "rejection", "without_replacement", WIDE, 4)
TYPICAL = Experiment("typical_lossy, deterministic tree", "typical_lossy", "top_k", TREE, vocab=4)

LOSSLESS = (
    MATCH_TREE,
    replace(MATCH_TREE, name="match, ragged deterministic tree", ragged=True),
    Experiment("match, greedy chain", "match", "top_k", CHAIN, 4),
    Experiment("match, sampled chain", "match", "iid", CHAIN, 4),
    Experiment("match, sampled tree", "match", "without_replacement", BUSHY_TREE, 3),
    REJECTION_TREE,
    replace(REJECTION_TREE, name="rejection, ragged deterministic tree", ragged=True),
    Experiment("rejection, greedy chain", "rejection", "top_k", CHAIN, 4),
    SAMPLED_CHAIN,
    replace(SAMPLED_CHAIN, name="rejection, ragged sampled chain", ragged=True),
    BLOCK_CHAIN,
    replace(BLOCK_CHAIN, name="block, ragged sampled chain", ragged=True),
    IID_WIDE,
    IID_TREE,
    Experiment("rejection, deep i.i.d. tree", "rejection", "iid", DEEP_TREE, 3),
    Experiment("rejection, bushy i.i.d. tree", "rejection", "iid", BUSHY_TREE, 2),
    ONCE_WIDE,
    Experiment("rejection, deep tree without replacement", "rejection", "without_replacement", DEEP_TREE, 3),
    Experiment("rejection, bushy tree without replacement", "rejection", "without_replacement", BUSHY_TREE, 3),
)

WARPED = Sampling(temperature=0.7, top_k=3)
WARPED_CHAIN = replace(SAMPLED_CHAIN, name="rejection, sampled chain, warped target", sampling=WARPED)
WARPED_TREE = replace(MATCH_TREE, name="match, deterministic tree, warped target", sampling=WARPED)
GREEDY_CHAIN = replace(SAMPLED_CHAIN, name="rejection, sampled chain, temperature 0", sampling=Sampling())
GREEDY_TREE = replace(MATCH_TREE, name="match, deterministic tree, temperature 0", sampling=Sampling())


def warped(cases: Cases) -> Cases:
    """The same logits under WARPED, worked out a second time: p ** (1 / T) over the k largest probabilities."""
    probs_RSV, sampling = cases.target_RSV, WARPED
    kth_RS1 = probs_RSV.sort(dim=-1, descending=True).values[..., sampling.top_k - 1 : sampling.top_k]
    kept_RSV = torch.where(probs_RSV >= kth_RS1, probs_RSV, 0.0) ** (1 / sampling.temperature)
    return replace(cases, target_RSV=kept_RSV / kept_RSV.sum(-1, keepdim=True))


def greedy(cases: Cases) -> Cases:
    """The same logits at temperature 0: one-hot on the first of the largest probabilities."""
    place_RS1 = cases.target_RSV.argmax(-1, keepdim=True)
    return replace(cases, target_RSV=torch.zeros_like(cases.target_RSV).scatter(-1, place_RS1, 1.0))


# Experiments whose target is not plain, with what makes the cases' target from the same logits.
PROCESSED = ((WARPED_CHAIN, warped), (WARPED_TREE, warped), (GREEDY_CHAIN, greedy), (GREEDY_TREE, greedy))
