"""The layout of EAGLE-1 and EAGLE-2 heads: fc, layers without a first input norm, the target's embedding, no output matrix."""

from __future__ import annotations

from typing import Any

import torch

from heads.checkpoint import build_head
from heads.eagle import Eagle1Config, Eagle1Head
from heads.errors import HeadwayError
from heads.formats.eagle3_raw import LAYER, matrix, rename_legacy
from heads.formats.files import Foreign, check_tensors, dtype_name
from heads.formats.layout import EMBEDDING, SGLANG, Exported, Layout, TargetFacts, check_embedding, check_target, refuse
from heads.formats.llama import layer_fields, layer_shapes, llama_fields
from heads.formats.recognise import EAGLE1

TITLE = "EAGLE-1/2 layout"


def write(head: Eagle1Head, target: TargetFacts, engine: str, draft_tokens: int) -> Exported:
    """Raises HeadwayError for a bias of fc that vLLM has no place for."""
    config, notes = head.config, list[str]()
    dtype = head.fc.weight.dtype
    tensors = dict(head.state_dict())
    bias = engine == SGLANG
    if bias and not config.fc_bias:
        tensors["fc.bias"] = torch.zeros(config.hidden_size, dtype=dtype)
        notes.append("fc.bias is written as zeros: SGLang makes one and would leave it random")
    if not bias and config.fc_bias:
        if bool(head.fc.bias.any()):
            raise refuse("fc has a bias", f"{TITLE} as vLLM reads it", "serve the head with SGLang (`--to sglang`)")
        del tensors["fc.bias"]
        notes.append("fc.bias is zero everywhere and left out: vLLM has no place for it")
    tensors[EMBEDDING] = target.embedding_VH.to(dtype)
    fields = {
        "architectures": ["LlamaForCausalLMEagle" if engine == SGLANG else "EagleLlamaForCausalLM"],
        **llama_fields(config, target, notes),
        "bias": bias,
        "torch_dtype": dtype_name(dtype),
    }
    check_tensors(tensors, shapes(fields, True), "export")
    return Exported(fields, tensors, notes=tuple(notes))


def shapes(config: dict[str, Any], embedding: bool) -> dict[str, tuple[int, ...]]:
    """What a config asks for: name -> shape."""
    hidden = config["hidden_size"]
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if config["bias"]:
        found["fc.bias"] = (hidden,)
    if embedding:
        found[EMBEDDING] = (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        prefix = f"layers.{number}."
        found |= layer_shapes(config, prefix, hidden)
        norms = ["post_attention_layernorm"] + (["input_layernorm"] if number else [])
        found |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
    return found


def read(foreign: Foreign, target: TargetFacts, taps: tuple[int, ...] | None) -> Eagle1Head:
    """The head in a folder. Raises HeadwayError for what it has more or less than `Eagle1Head`."""
    if taps is not None:
        raise HeadwayError(f"{foreign.folder}: an EAGLE-1 head reads the target's last state alone; leave --taps out")
    rename_legacy(foreign)
    check_embedding(foreign, target)
    tensors, weights, config = foreign.tensors, foreign.weights, foreign.config
    fc = matrix(foreign, "fc.weight")
    hidden = fc.shape[0]
    if fc.shape[1] != 2 * hidden:
        raise HeadwayError(f"{weights}: `fc.weight` is {list(fc.shape)}, not [H, 2H]; no EAGLE-1 head")
    if f"{LAYER}input_layernorm.weight" in tensors:
        raise HeadwayError(f"{weights}: its first layer norms its input, which EAGLE-1 heads here do not")
    vocabulary = int(config.get("vocab_size") or target.vocab_size)
    check_target(weights, target, hidden, vocabulary)
    if config.get("hidden_size") not in (None, hidden):
        foreign.note(
            f"hidden_size: the config says {config['hidden_size']}, the file holds {hidden}: the file is right"
        )
    if "fc.bias" in tensors and not bool(tensors["fc.bias"].any()):
        foreign.drop(lambda name: name == "fc.bias", "zero everywhere")
    layers = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=0)
    settings = layer_fields(foreign, config | {"hidden_size": hidden, "vocab_size": vocabulary}, LAYER, layers, target)
    parsed = Eagle1Config(hidden_size=hidden, vocab_size=vocabulary, fc_bias="fc.bias" in tensors, **settings)
    return build_head(Eagle1Head, parsed, tensors, weights)


LAYOUT = Layout(EAGLE1, TITLE, read, write)
