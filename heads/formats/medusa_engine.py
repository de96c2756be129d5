"""Medusa's engine layout, which vLLM read up to 0.32: blocks apart from outputs, one output for all heads where they share it.

Shapes: K heads, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from heads.checkpoint import build_head
from heads.errors import HeadwayError
from heads.formats.files import Foreign, check_tensors, dtype_name
from heads.formats.layout import Exported, Layout, TargetFacts, check_target, refuse
from heads.formats.medusa_original import no_taps, tell_counts
from heads.formats.recognise import MEDUSA_ENGINE
from heads.medusa import MedusaConfig, MedusaHead

TITLE = "Medusa engine layout"
WIDENED = (
    "the outputs are written over the full vocabulary: vLLM 0.32 refuses a `token_map`, which its loader does not count among the loaded "
    "weights"
)
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def write(head: MedusaHead, target: TargetFacts, engine: str, draft_tokens: int) -> Exported:
    """A head with a draft vocabulary is written over the full one (`widened`). Raises HeadwayError for Hydra heads."""
    if head.config.hydra:
        raise refuse("Hydra heads", TITLE, "nothing but `python eval/measure.py` decodes with them")
    written, notes = (widened(head), (WIDENED,)) if head.config.mapped else (head, ())
    config, head = written.config, written
    shared, hidden = config.output == "shared", config.hidden_size
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name.startswith("blocks.")}
    expected: dict[str, tuple[int, ...]] = {}
    for k in range(config.num_heads):
        for j in range(config.num_layers):
            expected[f"blocks.{k}.layers.{j}.weight"] = (hidden, hidden)
            expected[f"blocks.{k}.layers.{j}.bias"] = (hidden,)
    if shared:
        tensors["lm_head.weight"], expected["lm_head.weight"] = head.lm_head.weight, (config.vocab_size, hidden)
    else:
        tensors |= {f"lm_heads.{k}.weight": own for k, own in enumerate(head.lm_head.weight)}
        expected |= {f"lm_heads.{k}.weight": (config.vocab_size, hidden) for k in range(config.num_heads)}
    check_tensors(tensors, expected, "export")
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": hidden,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "torch_dtype": dtype_name(head.lm_head.weight.dtype),
    }
    return Exported(fields, tensors, notes=notes, head=written)


def widened(head: MedusaHead) -> MedusaHead:
    """The same drafts from outputs over the full vocabulary: a token outside the draft vocabulary has the mean of all drafted rows,
    whose logit is the mean of theirs and so never above the largest."""
    drafted = head.lm_head.weight.detach()
    mean = drafted.float().mean(-2, keepdim=True).to(drafted.dtype)
    wide = mean.repeat_interleave(head.config.vocab_size, -2).index_copy(-2, head.target_ids(), drafted)
    state = {name: tensor for name, tensor in head.state_dict().items() if name.startswith("blocks.")}
    config = replace(head.config, draft_vocab_size=None)
    return build_head(MedusaHead, config, state | {"lm_head.weight": wide}, Path("export"))


def read(foreign: Foreign, target: TargetFacts, taps: tuple[int, ...] | None) -> MedusaHead:
    """The head in a folder. Raises HeadwayError for tensors that do not belong to a whole one."""
    no_taps(foreign, taps)
    tensors = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in foreign.tensors.items()}
    found = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    heads, layers = (1 + max(int(match[part]) for match in found) for part in (1, 2))
    tell_counts(foreign, heads, layers, "num_heads", "num_hidden_layers")
    for k in range(heads):
        for j in range(layers):
            weight = tensors.get(f"blocks.{k}.layers.{j}.weight")
            if weight is not None and f"blocks.{k}.layers.{j}.bias" not in tensors:
                tensors[f"blocks.{k}.layers.{j}.bias"] = weight.new_zeros(len(weight))
                foreign.note("the residual layers have no bias: zeros are taken")
    vocabulary = int(foreign.config.get("vocab_size") or target.vocab_size)
    map_D = tensors.pop("token_map", None)
    if map_D is not None and (map_D.dim() != 1 or bool(((map_D < 0) | (map_D >= vocabulary)).any())):
        raise HeadwayError(f"{foreign.weights}: `token_map` is no list of ids below {vocabulary}")
    output = _output(foreign, tensors, heads, map_D)
    drafted, hidden = output.shape[-2:]
    if map_D is None and drafted != vocabulary:
        foreign.note(f"vocab_size: the config says {vocabulary}, the file holds {drafted}: the file is right")
        vocabulary = drafted
    check_target(foreign.weights, target, hidden, vocabulary)
    tensors["lm_head.weight"] = output
    config = MedusaConfig(
        hidden_size=hidden,
        vocab_size=vocabulary,
        draft_vocab_size=drafted if drafted < vocabulary else None,
        num_heads=heads,
        num_layers=layers,
        output="own" if output.dim() == 3 else "shared",
    )
    if config.mapped:
        tensors |= _maps(foreign, map_D, drafted, vocabulary)
    return build_head(MedusaHead, config, tensors, foreign.weights)


def _output(foreign: Foreign, tensors: dict[str, Tensor], heads: int, map_D: Tensor | None) -> Tensor:
    """[K, D, H], or [D, H] where one serves all heads; of rows over the full vocabulary those of the map are kept."""
    shared = "lm_head.weight" in tensors
    names = ["lm_head.weight"] if shared else [f"lm_heads.{k}.weight" for k in range(heads)]
    if missing := [name for name in names if name not in tensors]:
        raise HeadwayError(f"{foreign.weights}: tensor `{missing[0]}` is missing; the file is not a whole head")
    found = [tensors.pop(name) for name in names]
    if any(weight.dim() != 2 or weight.shape != found[0].shape for weight in found):
        raise HeadwayError(f"{foreign.weights}: the outputs of the heads are no matrices of one shape")
    if map_D is not None and len(found[0]) > len(map_D):
        found = [weight[map_D] for weight in found]
    return found[0] if shared else torch.stack(found)


def _maps(foreign: Foreign, map_D: Tensor | None, drafted: int, vocabulary: int) -> dict[str, Tensor]:
    if map_D is None or map_D.shape != (drafted,):
        raise HeadwayError(
            f"{foreign.weights}: `token_map` [{drafted}] is missing or misshapen: what do the drafts mean?"
        )
    mask_V = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, map_D, True)
    return {"d2t": map_D - torch.arange(drafted), "t2d": mask_V}


LAYOUT = Layout(MEDUSA_ENGINE, TITLE, read, write)
