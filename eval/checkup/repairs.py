"""Likely repairs of a head that drafts badly for no reason that its files give: the probe tries them, and names the one that helps.

Shapes: D draft vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from eval.checkup.acceptance import hits_by_head
from eval.checkup.draft_map import DraftMap
from eval.checkup.finding import Code
from eval.checkup.folder import HeadFolder
from eval.checkup.inventory import ATTENTION
from eval.checkup.patient import Patient
from eval.checkup.settings import target_rope
from eval.checkup.stated import Stated, plain_rope
from eval.checkup.texts import ProbeTexts
from heads.draft_layer import layer_settings
from heads.eagle3 import default_taps
from heads.formats.eagle3_raw import engine_taps
from heads.formats.layout import TargetFacts
from heads.formats.recognise import MEDUSA_ENGINE
from heads.medusa import MedusaHead


@dataclass(frozen=True)
class Repair:
    """A changed patient. `key`: of config.json, or a tensor; `what`: what is there now; `mend`: what to write."""

    code: Code
    key: str
    what: str
    mend: str
    patient: Patient


def repairs(
    patient: Patient, folder: HeadFolder, stated: Stated, target: TargetFacts, texts: ProbeTexts, drafts: DraftMap
) -> list[Repair]:
    """All that can be tried on these texts."""
    if patient.kind == "medusa":
        return [*_orders(patient, folder, texts), *_maps(patient, folder, drafts)]
    found = [*ropes(patient, stated, target), *_attentions(patient, stated, target)]
    if patient.kind == "eagle3":
        found += [*_taps(patient, stated, target, texts), *_switches(patient, stated), *_maps(patient, folder, drafts)]
    return found


def _taps(patient: Patient, stated: Stated, target: TargetFacts, texts: ProbeTexts) -> Iterator[Repair]:
    """One less or more, all of them or one; what engines and trainers take when nothing is said."""
    own = tuple(patient.config["taps"])
    tried = [tuple(tap + by for tap in own) for by in (-1, 1)]
    for place in range(len(own)):
        tried += [(*own[:place], own[place] + by, *own[place + 1 :]) for by in (-1, 1)]
    tried += [engine_taps(target.num_layers), default_taps(target.num_layers)]
    tried += [tuple(tap - 1 for tap in engine_taps(target.num_layers))]
    code = Code.TAPS if stated.taps_named else Code.TAPS_MISSING
    for taps in dict.fromkeys(tried):
        if taps != own and len(taps) == len(own) and len(set(taps)) == len(taps) and set(taps) <= set(texts.taps):
            what = f"means the inputs of layers {list(own)}"
            yield Repair(code, stated.key("taps"), what, f"write inputs of {list(taps)}", patient.having(taps=taps))


def ropes(patient: Patient, stated: Stated, target: TargetFacts) -> Iterator[Repair]:
    """The target's rope, where the head has another."""
    own, theirs = plain_rope(dict(patient.config["rope_parameters"])), target_rope(target)
    if own != theirs:
        changed = patient.having(rope_parameters=theirs)
        mend = f"write the target's, {theirs}"
        yield Repair(Code.ROPE, stated.key("rope_parameters"), f"means {own}", mend, changed)


def _attentions(patient: Patient, stated: Stated, target: TargetFacts) -> Iterator[Repair]:
    """The target's division of the same rows into heads."""
    settings = layer_settings(target.config)
    theirs = {name: int(settings[name]) for name in ATTENTION}
    own = {name: patient.config[name] for name in ATTENTION}
    rows = [
        (some["num_attention_heads"] * some["head_dim"], some["num_key_value_heads"] * some["head_dim"])
        for some in (own, theirs)
    ]
    if own != theirs and rows[0] == rows[1]:
        mend = "write the target's: " + ", ".join(f"{stated.key(name)} {value}" for name, value in theirs.items())
        what = "means " + ", ".join(f"{stated.key(name)} {value}" for name, value in own.items())
        yield Repair(Code.HEAD_DIM, stated.key("head_dim"), what, mend, patient.having(**theirs))


def _switches(patient: Patient, stated: Stated) -> Iterator[Repair]:
    for name in ("norm_output", "norm_before_residual"):
        other = not patient.config.get(name, False)
        mend = f'write "{name}": {str(other).lower()}'
        yield Repair(
            Code.NORM_SWITCH, stated.key(name), f"means {str(not other).lower()}", mend, patient.having(**{name: other})
        )


def _maps(patient: Patient, folder: HeadFolder, drafts: DraftMap) -> Iterator[Repair]:
    codes = {"absolute": Code.D2T_ABSOLUTE, "t2d": Code.MAP, "rows": Code.MAP_IDENTITY}
    says: dict[str, str] = {
        "absolute": "is read as offsets",
        "t2d": "gives other ids than `t2d` marks",
        "rows": "gives other ids than those whose rows of the target's output are like the head's",
    }
    mends = {"absolute": "subtract 0, 1, 2, ... from it", "t2d": "write those", "rows": "write those"}
    now, key = patient.tensors.get("d2t"), "token_map" if folder.layout == MEDUSA_ENGINE else "d2t"
    for name, ids_D in drafts.others.items():
        if now is not None and len(ids_D) == len(now) and not torch.equal(ids_D - torch.arange(len(now)), now):
            yield Repair(codes[name], key, says[name], mends[name], patient.mapped(ids_D))


def _orders(patient: Patient, folder: HeadFolder, texts: ProbeTexts) -> Iterator[Repair]:
    """The order in which most heads draft the place that they are best at."""
    head = patient.build(folder.path).to(texts.device)
    if not isinstance(head, MedusaHead) or head.config.hydra or head.config.num_heads < 2:
        return
    hits_KK = hits_by_head(head, texts.ends, texts.texts)
    heads, places = linear_sum_assignment(hits_KK.numpy(), maximize=True)
    order = [int(heads[list(places).index(place)]) for place in range(len(places))]
    if order != list(range(len(order))):
        what = f"the heads draft best in the order {order}: " + _best(hits_KK)
        yield Repair(
            Code.HEADS_SWAPPED,
            "heads",
            what,
            f"write head {order} of this file as head 0, 1, ...",
            patient.ordered(order),
        )


def _best(hits_KK: Tensor) -> str:
    rows = [
        f"head {k} hits place {int(row.argmax())} {float(row.max()):.0%} of the time" for k, row in enumerate(hits_KK)
    ]
    return ", ".join(rows)


def rows_of(patient: Patient) -> Tensor | None:
    """The output matrix [D, H] of a patient, the first head's where each has its own."""
    weight = patient.tensors.get("lm_head.weight")
    return weight[0] if weight is not None and weight.dim() == 3 else weight
