"""Whether drafting changed a text: greedy identity in fp32, and where texts part in a lower precision.

Shapes: T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from eval.contenders import BASELINE, Contender
from eval.decode import Settings, decode
from eval.ledger import Ledger
from eval.progress import Steps
from eval.report.schema import Divergence
from heads.target import Target


def identity(
    target: Target, contenders: Sequence[Contender], prompts: Sequence[list[int]], tokens: int, steps: Steps
) -> dict[str, list[str]]:
    """Per contender's name, one line for each prompt whose greedy ids differ from the baseline's or `generate`'s.

    `target` and the contenders are the fp32 ones; the baseline is among them. Empty lists mean identity.
    """
    settings = Settings(max_new_tokens=tokens)
    differs: dict[str, list[str]] = {contender.name: [] for contender in contenders}
    baseline = next(contender for contender in contenders if contender.name == BASELINE)
    for number, ids in enumerate(prompts):
        generated = generate(target, ids, tokens)
        steps.advance(tokens)
        plain = decode(target, baseline.drafter, [ids], settings).outputs[0].ids
        steps.advance(tokens)
        for contender in contenders:
            found = plain
            if contender is not baseline:
                found = (
                    decode(target, contender.drafter, [ids], settings, controller=contender.controller).outputs[0].ids
                )
                steps.advance(tokens)
            for other, name in ((plain, "the baseline"), (generated, "generate")):
                if (position := first_difference(found, other)) is not None:
                    differs[contender.name].append(f"prompt {number} leaves {name} at token {position}")
    return differs


def identity_work(contenders: int, prompts: int, tokens: int) -> int:
    """Tokens that `identity` decodes, at most: the unit of progress."""
    return (contenders + 1) * prompts * tokens


def generate(target: Target, ids: list[int], tokens: int) -> list[int]:
    """The new ids of transformers' own greedy decoding, with the target's stop tokens.

    Settings are given in full: one left unset would be taken from the target's generation config, and some targets
    ship a repetition penalty there.
    """
    stop = list(target.eos_ids)
    config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
    )
    ids_1T = torch.tensor([ids], device=target.device)
    with torch.inference_mode():
        found_1T = target.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=config)
    return found_1T[0, len(ids) :].tolist()


def divergences(target: Target, prompts: Sequence[list[int]], run: Ledger, baseline: Ledger) -> list[Divergence]:
    """Each prompt's first divergence of a run from the baseline, with the target's top-2 margin at that position.

    The margin is read in the target's dtype from one pass over the prompt and the common output: a thin one says that
    rounding chose, a wide one that something is wrong.
    """
    theirs: dict[int, list[int]] = {}
    for output in baseline.outputs:
        theirs.setdefault(output.prompt, output.ids)
    found: list[Divergence] = []
    seen: set[int] = set()
    for output in run.outputs:
        position = first_difference(output.ids, theirs[output.prompt])
        if position is not None and output.prompt not in seen:
            seen.add(output.prompt)
            margin = top2_margin(target, [*prompts[output.prompt], *output.ids[:position]])
            found.append(Divergence(prompt=output.prompt, position=position, margin=margin))
    return sorted(found, key=lambda divergence: divergence["prompt"])


def top2_margin(target: Target, ids: list[int]) -> float:
    """The gap between the two highest logits for the token after `ids`."""
    with torch.inference_mode():
        last_H = target.states(torch.tensor([ids], device=target.device)).last[0, -1]
        best = target.logits(last_H).float().topk(2).values
    return float(best[0] - best[1])


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, or that only one of the two has; None for equal ids."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
