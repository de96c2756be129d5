"""Medusa's original layout: `{k}.{j}.linear` for residual layer j of head k, `{k}.{layers}` for its output over the full vocabulary.

TensorRT-LLM's converter, TGI and vLLM up to 0.32 read it. Shapes: K heads, H hidden, V vocabulary.
"""

from __future__ import annotations

import re

import torch

from heads.checkpoint import build_head
from heads.errors import HeadwayError
from heads.formats.files import Foreign, check_tensors, dtype_name
from heads.formats.layout import Exported, Layout, TargetFacts, check_target, refuse
from heads.formats.recognise import MEDUSA
from heads.medusa import MedusaConfig, MedusaHead

TITLE = "original Medusa layout"
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def write(head: MedusaHead, target: TargetFacts, engine: str, draft_tokens: int) -> Exported:
    """Raises HeadwayError for Hydra heads, a shared output and a draft vocabulary."""
    config = head.config
    if config.hydra:
        raise refuse("Hydra heads", TITLE, "nothing but `python eval/measure.py` decodes with them")
    if config.output == "shared":
        raise refuse("one output shared by all heads", TITLE, "use the engine layout (`--to vllm`)")
    if config.mapped:
        raise refuse("a draft vocabulary", TITLE, "train with head.draft_vocab_size null")
    layers = config.num_layers
    state = head.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for k, own_VH in enumerate(state["lm_head.weight"]):
        tensors[f"{k}.{layers}.weight"] = own_VH
        for j in range(layers):
            for part in ("weight", "bias"):
                tensors[f"{k}.{j}.linear.{part}"] = state[f"blocks.{k}.layers.{j}.{part}"]
    hidden = config.hidden_size
    for k in range(config.num_heads):
        expected[f"{k}.{layers}.weight"] = (config.vocab_size, hidden)
        for j in range(layers):
            expected[f"{k}.{j}.linear.weight"], expected[f"{k}.{j}.linear.bias"] = (hidden, hidden), (hidden,)
    check_tensors(tensors, expected, "export")
    fields = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": target.served_name,
        "hidden_size": hidden,
        "vocab_size": config.vocab_size,
        "torch_dtype": dtype_name(head.lm_head.weight.dtype),
        "version": "2",
    }
    return Exported(fields, tensors, "medusa_lm_head.safetensors")


def read(foreign: Foreign, target: TargetFacts, taps: tuple[int, ...] | None) -> MedusaHead:
    """The head in a folder, as many heads and layers as the file holds. Raises HeadwayError where it is not whole."""
    no_taps(foreign, taps)
    places = {}
    for name in foreign.tensors:
        found = _NAME.fullmatch(name)
        if found is None:
            raise HeadwayError(f"{foreign.weights}: tensor `{name}` is none that the {TITLE} knows")
        places[int(found[1]), int(found[2]), found[3]] = name
    heads, layers = 1 + max(k for k, _, _ in places), max(j for _, j, _ in places)
    tell_counts(foreign, heads, layers, "medusa_num_heads", "medusa_num_layers")
    named, outputs = {}, []
    for k in range(heads):
        for j in range(layers):
            for part in ("weight", "bias"):
                named[f"blocks.{k}.layers.{j}.{part}"] = _take(foreign, places, k, j, f"linear.{part}")
        outputs.append(_take(foreign, places, k, layers, "weight"))
    if len(places) != heads * (2 * layers + 1):
        raise HeadwayError(
            f"{foreign.weights}: the heads do not have {layers} residual layers each; the file is not whole"
        )
    if any(output.shape != outputs[0].shape or output.dim() != 2 for output in outputs):
        raise HeadwayError(f"{foreign.weights}: the outputs of the heads differ in shape; the file is not whole")
    named["lm_head.weight"] = torch.stack(outputs)
    vocabulary, hidden = outputs[0].shape
    check_target(foreign.weights, target, hidden, vocabulary)
    config = MedusaConfig(hidden_size=hidden, vocab_size=vocabulary, num_heads=heads, num_layers=layers)
    return build_head(MedusaHead, config, named, foreign.weights)


def _take(foreign: Foreign, places: dict[tuple[int, int, str], str], k: int, j: int, part: str) -> torch.Tensor:
    name = places.get((k, j, part))
    if name is None:
        raise HeadwayError(f"{foreign.weights}: tensor `{k}.{j}.{part}` is missing; the file is not a whole head")
    return foreign.tensors[name]


def no_taps(foreign: Foreign, taps: tuple[int, ...] | None) -> None:
    """Raise HeadwayError where taps were given: Medusa heads read none."""
    if taps is not None:
        raise HeadwayError(f"{foreign.folder}: Medusa heads read the target's last state alone; leave --taps out")


def tell_counts(foreign: Foreign, heads: int, layers: int, heads_key: str, layers_key: str) -> None:
    """Note where the config names other numbers than the file holds."""
    for key, found in ((heads_key, heads), (layers_key, layers)):
        if foreign.config.get(key) not in (None, found):
            foreign.note(f"{key}: the config says {foreign.config[key]}, the file holds {found}: the file is right")


LAYOUT = Layout(MEDUSA, TITLE, read, write)
