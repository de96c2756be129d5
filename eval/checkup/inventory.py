"""The tensors of a file held against its config: sizes that contradict, tensors missing, unknown, misshapen.

Where the two contradict each other the file is right, so the rest is looked at with its sizes.
Shapes: K heads, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from eval.checkup.finding import WARNING, Code, Finding
from eval.checkup.folder import AGAIN, HeadFolder
from eval.checkup.header import Entry, some
from eval.checkup.patient import BLOCK, HARMLESS, KINDS, MAPS, OUTPUT, OUTPUTS
from eval.checkup.stated import Stated
from heads.errors import HeadwayError
from heads.formats.eagle3_raw import LAYER
from heads.formats.recognise import HEADWAY, MEDUSA_ENGINE

Shapes = dict[str, tuple[int, ...]]
ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim")


def settle(folder: HeadFolder, stated: Stated, entries: dict[str, Entry]) -> list[Finding]:
    """Put the file's sizes into `stated.config`, wherever they tell; findings about those that the config has wrong.

    `entries`: by the names of `own_names`.
    """
    shapes = {name: entry.shape for name, entry in entries.items()}
    sizes = _medusa_sizes(shapes) if stated.kind == "medusa" else _eagle_sizes(stated, shapes)
    found: list[Finding] = []
    if stated.kind == "eagle3" and (fused := shapes.get("fc.weight", ())) and len(fused) == 2 and fused[0]:
        stated.fused = fused[1] // fused[0]
    if stated.kind != "medusa":
        found += _settle_attention(folder, stated, shapes)
        found += _settle_norms(folder, stated, shapes)
    for name, size in sizes.items():
        says = stated.config.get(name)
        stated.config[name] = size
        # a full vocabulary is said by its size as well as by null
        if name in stated.says and says != size and not (name == "draft_vocab_size" and size is None):
            found.append(_contradiction(folder, stated, name, says, size))
    return found


def _contradiction(folder: HeadFolder, stated: Stated, name: str, says: Any, size: Any) -> Finding:
    where = f"{folder.config_file}: `{stated.key(name)}`"
    what = f"the config says {says}, the file holds {size}"
    mend = f"write {size}"
    if name in ("num_heads", "num_layers") and stated.kind == "medusa":
        severity = WARNING if isinstance(says, int) and says < size else "error"
        return Finding(Code.HEAD_COUNT, where, what, mend, severity, True)
    return Finding(Code.CONFIG, where, what, mend, mended=True)


def _rows(shapes: Shapes, name: str) -> int | None:
    shape = shapes.get(name)
    return shape[0] if shape is not None and len(shape) == 2 else None


def _eagle_sizes(stated: Stated, shapes: Shapes) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    numbers = [name.split(".")[1] for name in shapes if name.startswith("layers.")]
    layers = [int(number) for number in numbers if number.isdecimal()]
    sizes["num_layers"] = 1 + max(layers) if layers else None
    sizes["hidden_size"] = _rows(shapes, "fc.weight")
    sizes["intermediate_size"] = _rows(shapes, f"{LAYER}mlp.gate_proj.weight")
    sizes["vocab_size"] = shapes["t2d"][0] if len(shapes.get("t2d", ())) == 1 else None
    found = {name: size for name, size in sizes.items() if size is not None}
    for name, tensor in (("attention_bias", "self_attn.o_proj.bias"), ("mlp_bias", "mlp.down_proj.bias")):
        found[name] = f"{LAYER}{tensor}" in shapes
    if stated.kind == "eagle":
        return found | {"fc_bias": "fc.bias" in shapes}
    drafted = _rows(shapes, OUTPUT) or (shapes["d2t"][0] if len(shapes.get("d2t", ())) == 1 else None)
    vocabulary = found.get("vocab_size", stated.config.get("vocab_size"))
    if drafted is not None:
        found["draft_vocab_size"] = None if drafted == vocabulary else drafted
    return found


def _medusa_sizes(shapes: Shapes) -> dict[str, Any]:
    blocks = [found for name in shapes if (found := BLOCK.fullmatch(name))]
    outputs = [found for name in shapes if (found := OUTPUTS.fullmatch(name))]
    sizes: dict[str, Any] = {"num_heads": 1 + max((int(found[1]) for found in blocks), default=0)}
    sizes["num_layers"] = 1 + max((int(found[2]) for found in blocks), default=0)
    matrix = shapes.get(OUTPUT) or (shapes[outputs[0][0]] if outputs else None)
    if first := shapes.get("blocks.0.layers.0.weight"):
        sizes["hidden_size"] = first[0]
    if matrix is not None:
        drafted = next((shapes[name][0] for name in ("token_map", "d2t") if len(shapes.get(name, ())) == 1), matrix[-2])
        sizes["output"] = "own" if outputs or len(matrix) == 3 else "shared"
        if "token_map" in shapes or "d2t" in shapes:
            sizes["draft_vocab_size"] = drafted
        else:
            sizes |= {"vocab_size": drafted, "draft_vocab_size": None}
    return sizes


def _settle_attention(folder: HeadFolder, stated: Stated, shapes: Shapes) -> list[Finding]:
    """Heads, key-value heads and their size; rows of projections are products, so some of it has to be believed."""
    config = stated.config
    query, keys = (_rows(shapes, f"{LAYER}self_attn.{name}.weight") for name in ("q_proj", "k_proj"))
    named: list[Any] = [config.get(name) for name in ATTENTION]
    if query is None or keys is None or not all(isinstance(value, int) and value > 0 for value in named):
        return []
    heads, kv_heads, size = named
    if (heads * size, kv_heads * size) == (query, keys):
        return []
    says = f"{heads} heads, {kv_heads} key-value heads of size {size}, which the {query} and {keys} rows of q_proj and k_proj are not"
    fits = _divisions(heads, kv_heads, size, query, keys)
    where = f"{folder.config_file}: `{stated.key('head_dim')}`"
    if fits is None:
        return [Finding(Code.HEAD_DIM, where, says, "write those that the head was trained with")]
    changes = [
        f"`{stated.key(name)}` {value}" for name, value in zip(ATTENTION, fits, strict=True) if value != config[name]
    ]
    config |= dict(zip(ATTENTION, fits, strict=True))
    return [Finding(Code.HEAD_DIM, where, says, f"write {' and '.join(changes)}", mended=True)]


def _divisions(heads: int, kv_heads: int, size: int, query: int, keys: int) -> tuple[int, int, int] | None:
    """What fits the rows with as little as possible changed: the size, the key-value heads, or both counts."""
    if query % heads == 0 and kv_heads * (query // heads) == keys:
        return heads, kv_heads, query // heads
    if heads * size == query and keys % size == 0 and heads % (keys // size) == 0:
        return heads, keys // size, size
    if query % size == 0 and keys % size == 0 and (query // size) % (keys // size) == 0:
        return query // size, keys // size, size
    return None


def _settle_norms(folder: HeadFolder, stated: Stated, shapes: Shapes) -> list[Finding]:
    """Norms with weights of their own: a switch without weights, and weights without a switch."""
    found: list[Finding] = []
    if stated.kind != "eagle3":
        return found
    for name, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        there = any(tensor.startswith(prefix) for tensor in shapes)
        if there and not stated.config.get(name):
            where = f"{folder.config_file}: `{stated.key(name)}`"
            what = f"off, and the file holds the weights of {prefix}*: engines skip or refuse them"
            found.append(Finding(Code.NORM_SWITCH, where, what, f'write "{name}": true', mended=True))
            stated.config[name] = True
    return found


def expected_shapes(folder: HeadFolder, stated: Stated) -> Shapes:
    """Name -> shape of what a head of the settled config has, maps apart. Raises HeadwayError where the config makes no head."""
    head_class, config_class = KINDS[stated.kind]
    known = {field.name for field in fields(config_class)}
    try:
        config = config_class(**{key: value for key, value in stated.config.items() if key in known})
    except TypeError as error:
        raise HeadwayError(f"not a whole config ({error}); export the head again") from error
    with torch.device("meta"):
        head = head_class(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items() if name not in MAPS}
    if stated.kind == "medusa" and folder.layout != HEADWAY and len(shapes[OUTPUT]) == 3:
        heads, *shape = shapes.pop(OUTPUT)
        shapes |= {f"lm_heads.{k}.weight": tuple(shape) for k in range(heads)}
    return shapes


def compare(folder: HeadFolder, stated: Stated, entries: dict[str, Entry], wanted: Shapes) -> list[Finding]:
    """Findings about tensors that are missing, unknown or misshapen; `wanted` as `expected_shapes` gives it."""
    file_names = entries.keys()
    missing = sorted(set(wanted) - set(file_names))
    if folder.layout == MEDUSA_ENGINE and not any(name.endswith("bias") for name in file_names):
        missing = [name for name in missing if not name.endswith("bias")]
    extra = sorted(set(file_names) - set(wanted) - set(MAPS) - set(HARMLESS))
    found: list[Finding] = []
    where = str(folder.weights)
    outputs = [name for name in missing if name == OUTPUT or OUTPUTS.fullmatch(name)]
    norms = [name for name in missing if name not in outputs and "norm" in name]
    rest = [name for name in missing if name not in outputs and name not in norms]
    if outputs:
        what = f"{some(outputs)} is missing: engines draft with whatever stands in its place"
        found.append(
            Finding(Code.LM_HEAD_LOST, where, what, "export the head again, without tying its output to an embedding")
        )
    if norms:
        found.append(
            Finding(Code.NORM_MISSING, where, f"{some(norms)} is missing: engines take ones for it, or refuse", AGAIN)
        )
    if rest:
        found.append(Finding(Code.TENSOR_MISSING, where, f"{some(rest)} is missing", AGAIN))
    if extra:
        mend = "take it out, or export the head again: vLLM refuses it, SGLang skips it without a word"
        found.append(Finding(Code.TENSOR_EXTRA, where, f"{some(extra)}: no tensor of such a head", mend, mended=True))
    for name in sorted(set(wanted) & set(file_names)):
        shape = entries[name].shape
        if shape != wanted[name] and not _selected(stated, name, shape, wanted[name]):
            what = f"has shape {list(shape)}, the config and the other tensors ask for {list(wanted[name])}"
            found.append(Finding(Code.TENSOR_SHAPE, f"{where}: `{name}`", what, AGAIN))
    return found


def _selected(stated: Stated, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """An output over the full vocabulary of which a token map picks rows, as the engine layout of Medusa may have it."""
    output = stated.kind == "medusa" and (name == OUTPUT or OUTPUTS.fullmatch(name) is not None)
    return output and shape[-1:] == wanted[-1:] and shape[-2] == stated.config["vocab_size"]
