"""The texts of the probe: what the target wrote, with its states, few enough to take seconds.

Shapes: T positions of a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.conversations import SAMPLES, Conversation, read_conversations, render_all, split_heldout
from data_prep.store import FeatureStore, StoredConversation
from eval.decode import Settings, decode
from eval.drafters.none import NoDrafter
from eval.prompts import HELD_OUT, heldout_prompts
from eval.replay_steps import stored_text
from heads.embedded import EMBEDDED
from heads.errors import HeadwayError
from heads.target import Target, TargetEnds


@dataclass(frozen=True)
class ProbeTexts:
    """`source`: where they are from, in words; `taps`: layers whose inputs they hold. `validated`: the head's own held-out ones.

    `live`: they went through the target here, as it is now.
    """

    ends: TargetEnds
    texts: list[StoredConversation]
    source: str
    taps: tuple[int, ...]
    validated: bool = False
    live: bool = True

    @property
    def device(self) -> torch.device:
        """Where the target's ends are, and a head has to be."""
        return self.ends.lm_head_weight.device

    @property
    def tokens(self) -> int:
        return sum(int((text.turn_T > 0).sum()) for text in self.texts)


def stored_texts(
    store: FeatureStore, ends: TargetEnds, manifest: dict[str, Any], store_sha256: str, count: int, tokens: int
) -> ProbeTexts:
    """Conversations of a store that training left out: of the store that the head was trained on, its own validation."""
    recipe = manifest.get("recipe") or {}
    held_out = (recipe.get("data") or {}).get("held_out") or HELD_OUT
    own = (manifest.get("features") or {}).get("manifest_sha256") == store_sha256
    rows = [row for rows in store.conversations_by_hash()[:held_out] for row in rows]
    cut_texts = [text for row in rows if (text := cut(store[row], tokens)) is not None][:count]
    if not cut_texts:
        raise HeadwayError(
            f"{store.folder}: no answer of two tokens in what is held out; collect conversations with answers"
        )
    name = f"{len(cut_texts)} held-out conversations of {store.folder}"
    return ProbeTexts(ends, cut_texts, name, store.taps, validated=own, live=False)


def given_texts(target: Target, conversations: Path | None, count: int, tokens: int) -> ProbeTexts:
    """Conversations with answers of the target, run through it here: a file's, or what the embedded target comes with.

    None for another target: it answers the held-out prompts first. Raises HeadwayError for a file without answers that fit.
    """
    if conversations is not None:
        rows, source = read_conversations(conversations), str(conversations)
    elif target.name == EMBEDDED:
        rows, source = split_heldout(read_conversations(SAMPLES), HELD_OUT)[1], "the bundled held-out conversations"
    else:
        return _answered(target, count, tokens)
    texts = _through(target, _rendered(target, rows), count, tokens)
    if not texts:
        raise HeadwayError(
            f"{source}: no answer of two tokens within the target's positions; give conversations with answers"
        )
    return ProbeTexts(target.ends, texts, f"{len(texts)} of {source}", tuple(range(target.num_layers)))


def _rendered(target: Target, rows: Iterable[Conversation]) -> Iterable[tuple[str, list[int], list[int]]]:
    for row in rows:
        for made in render_all(target.tokenizer, row, target.eos_ids):
            yield made.id, made.ids, made.turn


def _answered(target: Target, count: int, tokens: int) -> ProbeTexts:
    fitting = [prompt for prompt in heldout_prompts(target) if len(prompt.ids) + tokens < target.max_positions][:count]
    if not fitting:
        raise HeadwayError(
            f"target '{target.name}': no bundled prompt fits its positions; give --conversations or --store"
        )
    rows = []
    for prompt in fitting:
        ledger = decode(target, NoDrafter(), [prompt.ids], Settings(tokens))
        answer = ledger.outputs[0].ids
        rows.append((prompt.source, prompt.ids + answer, [0] * len(prompt.ids) + [1] * len(answer)))
    texts = _through(target, rows, count, tokens)
    source = f"{len(texts)} bundled held-out prompts, answered by the target here"
    return ProbeTexts(target.ends, texts, source, tuple(range(target.num_layers)))


def _through(
    target: Target, rows: Iterable[tuple[str, list[int], list[int]]], count: int, tokens: int
) -> list[StoredConversation]:
    texts: list[StoredConversation] = []
    for name, ids, turns in rows:
        if len(texts) == count:
            break
        end = _end(turns, tokens)
        if end is not None and end <= target.max_positions:
            texts.append(stored_text(target, name, ids[:end], turns[:end]))
    return texts


def cut(text: StoredConversation, tokens: int) -> StoredConversation | None:
    """The text up to its first `tokens` answer tokens; None without two of them."""
    end = _end(text.turn_T.tolist(), tokens)
    if end is None:
        return None

    def first(states: Tensor) -> Tensor:
        return states[:end]

    return replace(
        text,
        ids_T=first(text.ids_T),
        turn_T=first(text.turn_T),
        last_TH=first(text.last_TH),
        taps={tap: first(states) for tap, states in text.taps.items()},
        top1_T=first(text.top1_T),
        lse_T=first(text.lse_T),
    )


def _end(turns: list[int], tokens: int) -> int | None:
    written = [place for place, turn in enumerate(turns) if turn > 0][:tokens]
    return written[-1] + 1 if len(written) > 1 else None
