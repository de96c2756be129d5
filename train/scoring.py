"""What a checkpoint is worth: its replayed tau while training goes on, and at the end a decode that confirms it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from data_prep.store import FeatureStore
from eval.contenders import build
from eval.decode import Settings, decode
from eval.ledger import Ledger
from eval.metrics import mean_accepted_length
from eval.replay import Replayed, chain, text_ranks, walk
from heads.checkpoint import Head, load_head
from heads.target import Target, resolve

CONFIRM_PROMPTS, CONFIRM_TOKENS = 4, 64
SMALL_BYTES = 2**30  # weights of a target that is decoded with at the end unless the recipe says otherwise


def whole_head(accelerator: Accelerator, head: Head) -> Head:
    """The head with all of its weights, for calls other than its forward: a copy where ZeRO-3 keeps only shards of it."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None or plugin.zero_stage < 3:
        return head
    # Not at the top: it takes seconds to import, and only such runs need it.
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(head.parameters())):
        state = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    with torch.device("meta"):
        copy = type(head)(head.config)
    copy.load_state_dict(state, assign=True)
    return copy.eval()


def gathered(accelerator: Accelerator, mine: Replayed) -> Replayed:
    """The replay of all processes' texts, the same in each of them."""
    return Replayed.joined(gather_object([mine]) if accelerator.num_processes > 1 else [mine])


def turned_over(best: dict[str, Any], latest: dict[str, Any]) -> bool:
    """Whether what the run was for fell while what it minimised went on falling."""
    return best["replayed_tau"] > latest["replayed_tau"] and best["training_loss"] > latest["training_loss"]


def prompts_to_confirm(asked: int | None, target: str) -> int:
    """How many prompts to decode at the end: as asked for, else a few where the target is small."""
    if asked is not None:
        return asked
    size = sum(path.stat().st_size for path in resolve(target).glob("*.safetensors"))
    return CONFIRM_PROMPTS if 0 < size <= SMALL_BYTES else 0


def confirm(
    head_folder: Path, target_name: str, store: FeatureStore, rows: Sequence[int], count: int, steps: int
) -> dict[str, Any]:
    """Decode the first answers of up to `count` held-out conversations greedily, and set it beside their replay.

    The target runs in the dtype that the store was collected in. The two figures may differ only where the target does
    not write the stored text again (it was sampled, or written in another dtype or by another engine).
    """
    target = Target.load(target_name, store.manifest["target"]["dtype"])
    head = load_head(head_folder, device=target.device, dtype=target.dtype)
    drafter = build(str(head_folder), target, steps).drafter
    decoded, replayed, identical = Ledger(), Ledger(), 0
    for number, row in enumerate(rows[:count]):
        stored = store[row]
        text = text_ranks(head, target.ends, stored, steps, candidates=1)
        if not text.tokens:
            continue
        first = int(stored.turn_T.nonzero()[0])
        settings = Settings(min(CONFIRM_TOKENS, len(text.tokens[0])))
        made = decode(target, drafter, [stored.ids_T[:first].tolist()], settings)
        decoded.absorb(made, [number])
        replayed.absorb(_first_answer(walk([text], chain(steps), settings.max_new_tokens)), [number])
        identical += made.outputs[0].ids == text.tokens[0][: settings.max_new_tokens]
    return {
        "prompts": len(decoded.outputs),
        "tau": mean_accepted_length(decoded).micro,
        "replayed_tau": mean_accepted_length(replayed).micro,
        "texts_identical": identical,
    }


def _first_answer(ledger: Ledger) -> Ledger:
    return Ledger([row for row in ledger.rounds if row.prompt == 0], ledger.outputs[:1])
