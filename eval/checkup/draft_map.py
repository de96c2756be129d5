"""The draft vocabulary's map: what draft id i stands for, as an engine reads it, and as it was meant.

EAGLE-3 files keep offsets (`d2t`: target id = i + d2t[i]) and a mask of the target's ids (`t2d`), Medusa's engine layout the ids
themselves (`token_map`). Shapes: V vocabulary, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.checkup.finding import Code, Finding
from heads.provenance import map_sha256

MOST_WORK = 10**12  # multiplications for comparing rows with the target's


@dataclass(frozen=True)
class DraftMap:
    """`served_D`: the target ids as an engine reads them, None where it cannot; `meant_D`: mended, where that is known.

    Both None where the vocabulary is whole. `others`: how else the file can be understood: name -> ids, for the probe to try.
    """

    served_D: Tensor | None
    meant_D: Tensor | None
    others: dict[str, Tensor]
    findings: tuple[Finding, ...] = ()


def read_map(
    named: dict[str, Tensor], draft: int | None, vocabulary: int, trained_sha256: str | None, where: str
) -> DraftMap:
    """The map of a file; `draft` is D, None for the whole vocabulary; `trained_sha256`: of the ids of the training, where kept."""
    if draft is None or draft >= vocabulary:
        return _whole(named, where)
    offsets, marks_V, ids = (named.get(name) for name in ("d2t", "t2d", "token_map"))
    own, name = (ids, "token_map") if ids is not None else (offsets, "d2t")
    where = f"{where}: `{name}`"
    if own is not None and own.shape != (draft,):
        what = f"has shape {list(own.shape)}, the output has {draft} rows"
        return DraftMap(None, None, {}, (Finding(Code.MAP, where, what, "export the head again"),))
    others = {}
    if marks_V is not None and int(marks_V.bool().sum()) == draft:
        others["t2d"] = marks_V.bool().nonzero().squeeze(1)
    plain_D = torch.arange(draft)
    if own is None:
        what = "is missing: engines take draft id i for target id i"
        return _named(Code.MAP_IDENTITY, plain_D, others, trained_sha256, where, what, vocabulary)
    own = own.to(torch.int64)
    served_D = own if ids is not None else plain_D + own
    if ids is None and _valid(own, vocabulary):
        others["absolute"] = own
    return _judge(served_D, others, trained_sha256, where, vocabulary)


def _whole(named: dict[str, Tensor], where: str) -> DraftMap:
    d2t_D = named.get("d2t")
    if d2t_D is None or not bool(d2t_D.any()):
        return DraftMap(None, None, {})
    what = "reorders a vocabulary that is the target's: engines make no map for one"
    return DraftMap(
        None, None, {}, (Finding(Code.MAP, f"{where}: `d2t`", what, "order the rows of lm_head by target id"),)
    )


def _judge(
    served_D: Tensor, others: dict[str, Tensor], trained_sha256: str | None, where: str, vocabulary: int
) -> DraftMap:
    """By the papers of the training where there are some, else by what the file says twice."""
    marked_D = others.get("t2d")
    valid, identity = _valid(served_D, vocabulary), torch.equal(served_D, torch.arange(len(served_D)))
    agrees = valid and (marked_D is None or torch.equal(served_D.sort().values, marked_D))
    sound = agrees and not identity
    if trained_sha256 is not None:
        sound = agrees and map_sha256(served_D) == trained_sha256
    if sound:
        return DraftMap(served_D, served_D, others)
    if valid and trained_sha256 == map_sha256(served_D):
        mend = "mark the ids that `d2t` gives"
        finding = Finding(Code.MAP, where, "is the training's, and `t2d` marks other ids", mend, mended=True)
        return DraftMap(served_D, served_D, others, (finding,))
    if _is_absolute(served_D, others, trained_sha256, vocabulary):
        what = "holds target ids, and every engine adds the draft id to it"
        return _named(Code.D2T_ABSOLUTE, served_D, others, trained_sha256, where, what, vocabulary)
    if identity:
        what = f"gives draft id i for target id i: the first {len(served_D)} ids"
        return _named(Code.MAP_IDENTITY, served_D, others, trained_sha256, where, what, vocabulary)
    what = (
        "gives ids outside the vocabulary, or one twice"
        if not valid
        else "is not the one that the head was trained with"
    )
    if valid and not agrees:
        what = "gives other ids than `t2d` marks"
    return _named(Code.MAP, served_D, others, trained_sha256, where, what, vocabulary)


def _is_absolute(served_D: Tensor, others: dict[str, Tensor], trained_sha256: str | None, vocabulary: int) -> bool:
    ids_D, marked_D = others.get("absolute"), others.get("t2d")
    if ids_D is None:
        return False
    if trained_sha256 is not None:
        return map_sha256(ids_D) == trained_sha256
    if marked_D is not None:
        return torch.equal(ids_D.sort().values, marked_D)
    return not _valid(served_D, vocabulary)


def _named(
    code: Code,
    served_D: Tensor,
    others: dict[str, Tensor],
    trained_sha256: str | None,
    where: str,
    what: str,
    vocabulary: int,
) -> DraftMap:
    """A finding, and the ids that were meant: those of the training where something in the file still gives them."""
    mends = {
        Code.D2T_ABSOLUTE: "subtract 0, 1, 2, ... from it",
        Code.MAP_IDENTITY: "write offsets: the target id of each draft id, less the draft id",
        Code.MAP: "take the map of the training: export the head again",
    }
    meant_D = others.get("absolute") if code is Code.D2T_ABSOLUTE else others.get("t2d")
    if meant_D is not None and trained_sha256 is not None and map_sha256(meant_D) != trained_sha256:
        meant_D = None
    if meant_D is not None and torch.equal(meant_D, served_D):
        meant_D = None
    finding = Finding(code, where, what, mends[code], mended=meant_D is not None)
    return DraftMap(served_D if _valid(served_D, vocabulary) else None, meant_D, others, (finding,))


def _valid(ids_D: Tensor, vocabulary: int) -> bool:
    inside = bool(((ids_D >= 0) & (ids_D < vocabulary)).all())
    return inside and len(ids_D.unique()) == len(ids_D)


def ids_by_rows(output_DH: Tensor, target_VH: Tensor) -> Tensor | None:
    """The target ids whose rows in the target's output are nearest: an output begins its training as a copy of them.

    None where that does not tell: the comparison is too big, two rows have one nearest, or they are far from all.
    """
    if len(output_DH) * target_VH.numel() > MOST_WORK:
        return None
    rows_VH = F.normalize(target_VH.float(), dim=1)
    nearest: list[tuple[Tensor, Tensor]] = []
    for chunk_RH in F.normalize(output_DH.float(), dim=1).split(256):
        best = (chunk_RH @ rows_VH.T).max(1)
        nearest.append((best.values, best.indices))
    likeness_D, ids_D = (torch.cat(parts) for parts in zip(*nearest, strict=True))
    return ids_D if _valid(ids_D, len(target_VH)) and float(likeness_D.mean()) > 0.5 else None
