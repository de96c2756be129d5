"""A head in one form, whatever layout it came in: fields of our own configs and names of our own tensors.

Repairs are tried on this form: each is the same head with a field, or a tensor, changed.

Shapes: K heads, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.checkpoint import Head, HeadConfig, build_head
from heads.eagle import Eagle1Config, Eagle1Head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.formats.eagle3_raw import LAYER, MIDLAYER
from heads.formats.layout import EMBEDDING
from heads.formats.recognise import HEADWAY, MEDUSA, MEDUSA_ENGINE
from heads.medusa import MedusaConfig, MedusaHead

KINDS: dict[str, tuple[type[Head], type[HeadConfig]]] = {
    "eagle": (Eagle1Head, Eagle1Config),
    "eagle3": (Eagle3Head, Eagle3Config),
    "medusa": (MedusaHead, MedusaConfig),
}
OUTPUT, OUTPUTS = "lm_head.weight", re.compile(r"lm_heads\.(\d+)\.weight")
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
MAPS = ("d2t", "t2d", "token_map")
HARMLESS = (EMBEDDING, "verifier_lm_head.weight", "verifier_norm.weight")
_ORIGINAL = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_MEDUSA_PREFIX = re.compile(r"^medusa_heads?\.")


def own_names(layout: str, names: Iterable[str]) -> dict[str, str]:
    """Name in the file -> name here. What a layout's readers leave out is left out; what nobody knows keeps its name."""
    names = list(names)
    if layout == HEADWAY:
        return {name: name for name in names}
    if layout in (MEDUSA, MEDUSA_ENGINE):
        plain = {name: _MEDUSA_PREFIX.sub("", name) for name in names}
        return plain if layout == MEDUSA_ENGINE else {name: _original(own) for name, own in plain.items()}
    renamed = {name: name.removeprefix("model.").replace(MIDLAYER, LAYER) for name in names}
    return {name: own for name, own in renamed.items() if not own.endswith("rotary_emb.inv_freq")}


def _original(name: str) -> str:
    """Of the original Medusa layout: `{k}.{j}.linear` is a residual layer, a weight without one an output."""
    found = _ORIGINAL.fullmatch(name)
    if found is None:
        return name
    if found[3] == "weight":
        return f"lm_heads.{found[1]}.weight"
    return f"blocks.{found[1]}.layers.{found[2]}.{found[3].removeprefix('linear.')}"


@dataclass(frozen=True)
class Patient:
    """`config`: fields of the kind's config; `tensors`: of the head's own state dict."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def build(self, where: Path) -> Head:
        """The head, in float32. Raises HeadwayError where config and tensors do not make one."""
        head_class, config_class = KINDS[self.kind]
        known = {field.name for field in fields(config_class)}
        config = config_class(**{key: value for key, value in self.config.items() if key in known})
        floats = {
            name: value.float() if value.is_floating_point() else value.clone() for name, value in self.tensors.items()
        }
        return build_head(head_class, config, floats, where)

    def is_same(self, other: Patient) -> bool:
        """Whether both are one head."""
        alike = self.kind == other.kind and self.config == other.config and self.tensors.keys() == other.tensors.keys()
        return alike and all(torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items())

    def having(self, **fields_: Any) -> Patient:
        """The same with other fields."""
        return replace(self, config=self.config | fields_)

    def mapped(self, ids_D: Tensor | None) -> Patient:
        """The same drafting these target ids; None: all of them."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in MAPS}
        if ids_D is not None:
            mask_V = torch.zeros(self.config["vocab_size"], dtype=torch.bool).index_fill(0, ids_D, True)
            tensors |= {"d2t": ids_D - torch.arange(len(ids_D)), "t2d": mask_V}
        size = None if ids_D is None else len(ids_D)
        return replace(self, tensors=tensors, config=self.config | {"draft_vocab_size": size})

    def ordered(self, order: Sequence[int]) -> Patient:
        """Medusa: head `order[k]` of this one as head k."""
        tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if found := BLOCK.fullmatch(name):
                k = list(order).index(int(found[1]))
                tensors[f"blocks.{k}.layers.{found[2]}.{found[3]}"] = tensor
        if tensors[OUTPUT].dim() == 3:
            tensors[OUTPUT] = self.tensors[OUTPUT][list(order)]
        return replace(self, tensors=tensors)


def assemble(kind: str, config: dict[str, Any], named: dict[str, Tensor], ids_D: Tensor | None) -> Patient:
    """A patient of the tensors of a file, by the names here: outputs a head stacked, biases that a file lacks zero.

    A bias of fc that is zero everywhere is left out: one engine wants it, another refuses it.
    """
    tensors = {name: tensor for name, tensor in named.items() if name not in HARMLESS}
    if kind == "eagle" and "fc.bias" in tensors and not bool(tensors["fc.bias"].any()):
        del tensors["fc.bias"]
        config = config | {"fc_bias": False}
    if kind == "medusa" and OUTPUT not in tensors:
        outputs = {int(found[1]): name for name in tensors if (found := OUTPUTS.fullmatch(name))}
        tensors[OUTPUT] = torch.stack([tensors.pop(outputs[k]) for k in sorted(outputs)])
    if kind == "medusa":
        if ids_D is not None and tensors[OUTPUT].shape[-2] > len(ids_D):
            tensors[OUTPUT] = tensors[OUTPUT][..., ids_D, :]
        for name in [name for name in tensors if BLOCK.fullmatch(name) and name.endswith("weight")]:
            bias = name.removesuffix("weight") + "bias"
            tensors.setdefault(bias, tensors[name].new_zeros(len(tensors[name])))
    return Patient(kind, config, tensors).mapped(ids_D)
