"""What a config says, as the engines that read it understand it: fields of our own configs, each engine's defaults filled in.

Shapes are settled against the tensors in `eval/checkup/inventory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

from eval.checkup.finding import Code, Finding
from eval.checkup.folder import HeadFolder
from eval.checkup.patient import KINDS
from heads.draft_layer import read_rope
from heads.formats.eagle3_raw import IDS, engine_taps
from heads.formats.layout import TargetFacts
from heads.formats.recognise import EAGLE3, HEADWAY, MEDUSA, MEDUSA_ENGINE, SPECULATORS

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass
class Stated:
    """`config`: fields that the config states or that an engine fills in; `says`: those that it states itself.

    `keys`: field -> its key in config.json, where it is another. `taps_named`: whether the config names the taps. `fused`: how
    many of them the weights of fc read, None where those do not tell.
    """

    kind: str
    config: dict[str, Any]
    says: set[str] = field(default_factory=set)
    keys: dict[str, str] = field(default_factory=dict)
    taps_named: bool = False
    fused: int | None = None
    findings: list[Finding] = field(default_factory=list)

    def key(self, name: str) -> str:
        return self.keys.get(name, name)


def read_config(folder: HeadFolder, target: TargetFacts) -> Stated:
    """The config of a folder whose layout is known."""
    if folder.layout == HEADWAY:
        return _ours(folder)
    if folder.layout in (MEDUSA, MEDUSA_ENGINE):
        return _medusa(folder, target)
    return _eagle(folder, target)


def _ours(folder: HeadFolder) -> Stated:
    config = {key: value for key, value in folder.config.items() if key != "kind"}
    kind = str(folder.config["kind"])
    stated = Stated(kind if kind in KINDS else "", config, set(config), taps_named=True)
    if not stated.kind:
        stated.findings.append(
            _config(folder, "kind", f"'{kind}' is none of {', '.join(KINDS)}", "name the head's kind")
        )
        return stated
    known = {item.name for item in fields(KINDS[kind][1])}
    for key in sorted(set(config) - known):
        unknown = _config(folder, key, f"no {kind} head has this key", "take it out")
        stated.findings.append(replace(unknown, mended=True))
        del config[key]
    return stated


def _medusa(folder: HeadFolder, target: TargetFacts) -> Stated:
    """Sizes are the file's; only the numbers of heads and layers are stated in a way that an engine heeds."""
    original = folder.layout == MEDUSA
    names = {
        "num_heads": "medusa_num_heads" if original else "num_heads",
        "num_layers": "medusa_num_layers" if original else "num_hidden_layers",
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "draft_vocab_size": "truncated_vocab_size",
    }
    config = {name: folder.config[key] for name, key in names.items() if isinstance(folder.config.get(key), int)}
    output = "shared" if folder.config.get("original_lm_head") else "own"
    return Stated("medusa", {"vocab_size": target.vocab_size, "output": output} | config, set(config), names)


def _eagle(folder: HeadFolder, target: TargetFacts) -> Stated:
    whole = folder.config
    inner: Any = whole
    stated = Stated("eagle" if folder.layout not in (EAGLE3, SPECULATORS) else "eagle3", {})
    prefix = ""
    if folder.layout == SPECULATORS:
        inner, prefix = whole.get("transformer_layer_config"), "transformer_layer_config."
        if not isinstance(inner, dict):
            mend = "write the draft layer's Llama config there"
            stated.findings.append(_config(folder, "transformer_layer_config", "missing", mend))
            inner = {}
    stated.config |= _layer(inner)
    stated.says = {name for name in stated.config if inner.get(KEYS.get(name, name)) is not None}
    stated.keys = {name: f"{prefix}{KEYS.get(name, name)}" for name in stated.config}
    stated.keys["rope_parameters"] = f"{prefix}rope_theta"
    stated.config.setdefault("vocab_size", target.vocab_size)
    if stated.kind == "eagle":
        return stated
    stated.config["draft_vocab_size"] = whole.get("draft_vocab_size")
    for name in SWITCHES:
        # a speculators config without this one means true
        missing = folder.layout == SPECULATORS and name == "norm_before_residual"
        stated.config[name] = bool(whole.get(name, missing))
    stated.says |= {name for name in ("draft_vocab_size", *SWITCHES) if name in whole}
    _read_taps(folder, target, stated)
    return stated


KEYS = {"num_layers": "num_hidden_layers", "rope_parameters": "rope_theta"}
DEFAULTS = {
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_layers": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Of transformers' LlamaConfig, which engines read these configs with."""


def _layer(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: config.get(KEYS.get(name, name)) for name in DEFAULTS}
    made: dict[str, Any] = {name: DEFAULTS[name] if value is None else value for name, value in found.items()}
    made |= {name: config[name] for name in ("hidden_size", "vocab_size") if isinstance(config.get(name), int)}
    heads, hidden = made["num_attention_heads"], made.get("hidden_size")
    made["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    size = config.get("head_dim")
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        size = hidden // heads
    made["head_dim"] = size
    made["rope_parameters"] = plain_rope(read_rope(SimpleNamespace(**config)))
    return made


def plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing."""
    return {key: value for key, value in rope.items() if not (key == "partial_rotary_factor" and value == 1.0)}


def _read_taps(folder: HeadFolder, target: TargetFacts, stated: Stated) -> None:
    """Inputs of layers, as vLLM's key has them; SGLang's key names outputs, one less; without either, the engines' own."""
    engine = folder.config.get("eagle_config")
    entering, outputs = (
        found if isinstance(found, list) else None
        for found in (folder.config.get(IDS), engine.get(IDS) if isinstance(engine, dict) else None)
    )
    stated.taps_named, stated.keys["taps"] = bool(entering or outputs), IDS
    if entering:
        stated.config["taps"] = tuple(entering)
    elif outputs:
        stated.keys["taps"] = f"eagle_config.{IDS}"
        stated.config["taps"] = tuple(output + 1 for output in outputs)
    else:
        stated.config["taps"] = engine_taps(target.num_layers)
    if entering and outputs and list(entering) != [output + 1 for output in outputs]:
        what = (
            f"the top level names inputs of layers {entering}, `eagle_config` outputs of layers {outputs}: not the same"
        )
        mend = "`eagle_config` counts outputs, one less than the inputs at the top level; correct the wrong one"
        stated.findings.append(Finding(Code.TAPS, f"{folder.config_file}: `{IDS}`", what, mend))


def _config(folder: HeadFolder, key: str, what: str, mend: str) -> Finding:
    return Finding(Code.CONFIG, f"{folder.config_file}: `{key}`", what, mend)
