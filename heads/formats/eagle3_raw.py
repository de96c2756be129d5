"""EAGLE-3's raw layout, which vLLM and SGLang read and which public heads have.

Tap ids: heads here, and vLLM's `eagle_aux_hidden_state_layer_ids` at top level, count layers whose INPUT is read; SGLang's
`eagle_config` counts layers whose OUTPUT is read, one less. Without ids both engines take 2, N // 2 and N - 3 of N layers.

Shapes: H hidden, V vocabulary, D draft vocabulary, F taps side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.checkpoint import build_head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.errors import HeadwayError
from heads.formats.files import Foreign, check_tensors, dtype_name
from heads.formats.layout import SGLANG, Exported, Layout, TargetFacts, check_embedding, check_target, refuse
from heads.formats.llama import layer_fields, layer_shapes, llama_fields
from heads.formats.recognise import EAGLE3

TITLE = "raw EAGLE-3 layout"
MIDLAYER, LAYER = "midlayer.", "layers.0."
IDS = "eagle_aux_hidden_state_layer_ids"


def engine_taps(layers: int) -> tuple[int, ...]:
    """What engines read of a target of N layers when a config names no taps."""
    return (2, layers // 2, layers - 3)


def write(head: Eagle3Head, target: TargetFacts, engine: str, draft_tokens: int) -> Exported:
    """Raises HeadwayError for more than one layer, and for what the engine would skip without a word."""
    config, notes = head.config, list[str]()
    if config.num_layers != 1:
        raise refuse(f"{config.num_layers} draft layers", TITLE, "use `--to speculators`, which vLLM reads")
    if engine == SGLANG:
        _refuse_sglang(config)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_fields(config, target, notes),
        "draft_vocab_size": config.output_size,
        "target_hidden_size": config.hidden_size,
        **norm_switches(config),
        "torch_dtype": dtype_name(head.fc.weight.dtype),
    }
    if config.taps != engine_taps(target.num_layers):
        fields |= {IDS: list(config.taps), "num_aux_hidden_states": len(config.taps)}
        if (
            min(config.taps) > 0
        ):  # what enters layer 0 is no layer's output: SGLang cannot read it, and is refused above
            fields["eagle_config"] = {"use_aux_hidden_state": True, IDS: [tap - 1 for tap in config.taps]}
        notes.append(
            f"taps: inputs of layers {list(config.taps)}, written for vLLM and for SGLang, each in its counting"
        )
    tensors = {name.replace(LAYER, MIDLAYER): tensor for name, tensor in head.state_dict().items()}
    check_tensors(tensors, shapes(fields, [MIDLAYER], len(config.taps)), "export")
    return Exported(fields, tensors, notes=tuple(notes))


def _refuse_sglang(config: Eagle3Config) -> None:
    for name in ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise HeadwayError(
                f"{name}: SGLang ignores it and would draft rubbish; serve this head with vLLM (`--to vllm`)"
            )
    if len(config.taps) != 3 or 0 in config.taps:
        raise HeadwayError(
            f"taps {list(config.taps)}: SGLang reads three taps, each the output of a layer; serve this head with vLLM"
        )


def norm_switches(config: Eagle3Config) -> dict[str, bool]:
    """Every switch, said out loud: a missing one means another thing to another engine."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(config, name) for name in names}


def shapes(config: dict[str, Any], layers: list[str], taps: int) -> dict[str, tuple[int, ...]]:
    """What a config asks for: name -> shape; `layers` are the prefixes of the draft layers."""
    hidden, draft, vocabulary = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
    }
    if draft != vocabulary:
        found |= {"d2t": (draft,), "t2d": (vocabulary,)}
    if config["fc_norm"]:
        found |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(taps)}
    if config["norm_before_fc"]:
        found["input_norm.weight"] = (taps * hidden,)
    for number, prefix in enumerate(layers):
        found |= layer_shapes(config, prefix, hidden if number else 2 * hidden)
        norms = ["input_layernorm", "post_attention_layernorm"] + ([] if number else ["hidden_norm"])
        found |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
    return found


def read(foreign: Foreign, target: TargetFacts, taps: tuple[int, ...] | None) -> Eagle3Head:
    """The head in a folder. Raises HeadwayError for what it has more or less than `Eagle3Head`."""
    rename_legacy(foreign)
    config = foreign.config
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise HeadwayError(f"{foreign.folder}: reads no taps (`use_aux_hidden_state` false); EAGLE-3 heads here do")
    return read_head(foreign, config, config, tap_ids(foreign, target, taps), target)


def rename_legacy(foreign: Foreign) -> None:
    """Old names to those of the head's state dict; buffers that belong to no checkpoint are left out."""
    named = {name.removeprefix("model.").replace(MIDLAYER, LAYER): tensor for name, tensor in foreign.tensors.items()}
    if len(named) < len(foreign.tensors):
        raise HeadwayError(
            f"{foreign.weights}: two tensors have one meaning (`{MIDLAYER}` and `{LAYER}`); drop one of them"
        )
    foreign.tensors = named
    foreign.drop(lambda name: name.endswith("rotary_emb.inv_freq"), "made from the config's rope")


def read_head(
    foreign: Foreign, config: dict[str, Any], switches: dict[str, Any], taps: tuple[int, ...], target: TargetFacts
) -> Eagle3Head:
    """`config` holds the Llama fields, `switches` the norms and the vocabulary; tensors have the head's names."""
    check_embedding(foreign, target)
    tensors, weights = foreign.tensors, foreign.weights
    fc_HF, lm_head_DH = (matrix(foreign, name) for name in ("fc.weight", "lm_head.weight"))
    hidden, draft = fc_HF.shape[0], lm_head_DH.shape[0]
    if fc_HF.shape[1] != len(taps) * hidden:
        raise HeadwayError(
            f"{weights}: `fc.weight` is {list(fc_HF.shape)}: not {len(taps)} taps of {hidden} values; "
            f"the taps are {list(taps)}; give those of this head with --taps"
        )
    vocabulary = len(tensors["t2d"]) if "t2d" in tensors else int(config.get("vocab_size") or target.vocab_size)
    check_target(weights, target, hidden, vocabulary)
    for key, where, found in (
        ("hidden_size", config, hidden),
        ("vocab_size", config, vocabulary),
        ("draft_vocab_size", switches, draft),
    ):
        if where.get(key) not in (None, found):
            foreign.note(f"{key}: the config says {where[key]}, the file holds {found}: the file is right")
    settle_maps(foreign, draft, vocabulary)
    layers = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=0)
    settings = layer_fields(foreign, config | {"hidden_size": hidden, "vocab_size": vocabulary}, LAYER, layers, target)
    parsed = Eagle3Config(
        hidden_size=hidden,
        vocab_size=vocabulary,
        draft_vocab_size=draft if draft < vocabulary else None,
        taps=taps,
        **settings,
        **_switches(foreign, switches),
    )
    return build_head(Eagle3Head, parsed, tensors, weights)


def _switches(foreign: Foreign, config: dict[str, Any]) -> dict[str, Any]:
    """The norms; those with tensors of their own are what the file says."""
    found = {name: bool(config.get(name, False)) for name in ("norm_output", "norm_before_residual")}
    for name, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        found[name] = tensor in foreign.tensors
        if name in config and bool(config[name]) != found[name]:
            foreign.note(f"{name}: the config says {config[name]}, the file holds {found[name]}: the file is right")
    return found


def settle_maps(foreign: Foreign, draft: int, vocabulary: int) -> None:
    """`d2t` and `t2d` as heads store them. Raises HeadwayError for maps that are missing, or hold ids instead of offsets."""
    tensors = foreign.tensors
    d2t_D, t2d_V = tensors.get("d2t"), tensors.get("t2d")
    if draft >= vocabulary:
        if d2t_D is not None and bool(d2t_D.any()):
            raise HeadwayError(f"{foreign.weights}: `d2t` reorders a full vocabulary, which heads here do not")
        foreign.drop(lambda name: name in ("d2t", "t2d"), "the draft vocabulary is the target's")
        return
    if d2t_D is None or d2t_D.dim() != 1 or len(d2t_D) != draft:
        raise HeadwayError(
            f"{foreign.weights}: `d2t` [{draft}] is missing or misshapen: nobody knows what the drafts mean"
        )
    ids_D = torch.arange(draft) + d2t_D
    if t2d_V is not None:
        marked_D = t2d_V.bool().nonzero().squeeze(1)
        tensors["t2d"] = t2d_V.bool()
        if not torch.equal(ids_D.sort().values, marked_D) and torch.equal(d2t_D.sort().values, marked_D):
            raise HeadwayError(
                f"{foreign.weights}: `d2t` holds target ids, and every engine adds the draft id to it; subtract 0, 1, 2, ... from it"
            )
        return
    if bool(((ids_D < 0) | (ids_D >= vocabulary)).any()):
        raise HeadwayError(f"{foreign.weights}: `d2t` gives ids outside the {vocabulary} of the target")
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids_D, True)
    foreign.note("t2d is missing and was made from d2t")


def tap_ids(foreign: Foreign, target: TargetFacts, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """The layers whose input is read: as given, as the config says in either counting, or the engines' own.

    Raises HeadwayError where the two countings contradict each other.
    """
    entering = foreign.config.get(IDS)
    outputs = (foreign.config.get("eagle_config") or {}).get(IDS)
    if given is not None:
        taps = given
    elif entering and outputs and list(entering) != [output + 1 for output in outputs]:
        raise HeadwayError(
            f"{foreign.folder / 'config.json'}: `{IDS}` {entering} and `eagle_config` {outputs} do not mean the same layers (the "
            f"second counts outputs, one less); give the layers whose input is read with --taps"
        )
    elif entering:
        taps = tuple(entering)
    elif outputs:
        taps = tuple(output + 1 for output in outputs)
        foreign.note(f"taps: `eagle_config` names the outputs of layers {outputs}: the inputs of {list(taps)}")
    else:
        taps = engine_taps(target.num_layers)
        foreign.note(f"taps: the config names none; the engines' own are taken, the inputs of layers {list(taps)}")
    if len(set(taps)) < len(taps) or any(not 0 <= tap < target.num_layers for tap in taps):
        raise HeadwayError(
            f"{foreign.folder}: taps {list(taps)} are not distinct layers of '{target.name}', 0 to {target.num_layers - 1}; "
            "give those of this head with --taps"
        )
    return taps


def matrix(foreign: Foreign, name: str) -> Tensor:
    """A tensor of two dimensions. Raises HeadwayError where there is none."""
    found = foreign.tensors.get(name)
    if found is None or found.dim() != 2:
        raise HeadwayError(f"{foreign.weights}: tensor `{name}` is missing or no matrix; the file is not a whole head")
    return found


LAYOUT = Layout(EAGLE3, TITLE, read, write)
