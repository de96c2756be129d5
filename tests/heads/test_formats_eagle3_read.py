"""EAGLE-3 folders of other people: read as their engines read them, and refused with what is wrong.

Shapes as in tests/heads/foreign.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.eagle3 import Eagle3Head
from heads.errors import HeadwayError
from heads.formats.layout import TargetFacts
from heads.formats.layouts import read_head
from tests.heads.foreign import (
    INNER,
    POSITIONS,
    SIZE,
    TAPS,
    D,
    H,
    eagle3_config,
    eagle3_tensors,
    save,
    speculators_config,
)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_a_public_folder_is_read_and_its_config_is_not_believed(
    tmp_path: Path, target: TargetFacts, name: str, layer: str
):
    tensors = {
        name: t.half() if t.is_floating_point() else t for name, t in eagle3_tensors(target.vocab_size, layer).items()
    }
    wrong = {"max_position_embeddings": 128, "torch_dtype": "bfloat16", "draft_vocab_size": 32000, "head_dim": 16}
    config = eagle3_config(target.vocab_size, **wrong, intermediate_size=99, num_hidden_layers=32)
    folder = save(tmp_path / "public", config, tensors, name)
    found = read_head(folder, target.name)
    head = found.head
    assert isinstance(head, Eagle3Head)
    assert (head.config.head_dim, head.config.intermediate_size, head.config.num_layers) == (SIZE, INNER, 1)
    assert (head.config.max_position_embeddings, head.config.draft_vocab_size) == (POSITIONS, D)
    assert head.taps == TAPS
    state = head.state_dict()
    assert {name.replace(layer, "layers.0.") for name in tensors} == set(state)
    for key, tensor in tensors.items():
        assert torch.equal(state[key.replace(layer, "layers.0.")], tensor), key
    notes = "\n".join(found.notes)
    for word in (
        "max_position_embeddings",
        "bfloat16",
        "draft_vocab_size",
        "head_dim",
        "intermediate_size",
        "num_hidden",
    ):
        assert word in notes
    assert head.manifest["target"] == {"name": target.name, "fingerprint": target.fingerprint}


def test_the_readings_of_tap_ids(tmp_path: Path, target: TargetFacts):
    tensors = eagle3_tensors(target.vocab_size)
    ids = "eagle_aux_hidden_state_layer_ids"

    def taps(name: str, given: tuple[int, ...] | None = None, **more: Any) -> tuple[int, ...]:
        folder = save(tmp_path / name, eagle3_config(target.vocab_size, **more), tensors)
        return read_head(folder, target.name, given).head.config.taps

    assert taps("none") == (2, 4, 5)
    assert taps("vllm", **{ids: [1, 3, 6]}) == (1, 3, 6)
    assert taps("sglang", eagle_config={ids: [1, 3, 6]}) == (2, 4, 7)
    assert taps("both", **{ids: [2, 4, 7], "eagle_config": {ids: [1, 3, 6]}}) == (2, 4, 7)
    with pytest.raises(HeadwayError, match=r"do not mean the same layers.*--taps"):
        taps("neither", **{ids: [1, 3, 6], "eagle_config": {ids: [1, 3, 6]}})
    assert taps("given", (1, 3, 6), **{ids: [1, 3, 6], "eagle_config": {ids: [1, 3, 6]}}) == (1, 3, 6)
    with pytest.raises(HeadwayError, match=r"not distinct layers.*0 to 7"):
        taps("far", **{ids: [2, 4, 8]})
    with pytest.raises(HeadwayError, match=r"not 2 taps"):
        taps("few", **{ids: [2, 4]})


def test_speculators_folders_are_read(tmp_path: Path, target: TargetFacts):
    vocab = target.vocab_size
    tensors = eagle3_tensors(vocab, "layers.0.")
    embedding = target.embedding_VH.to(torch.bfloat16).float()
    more = {"embed_tokens.weight": embedding, "verifier_norm.weight": torch.ones(H)}
    config = speculators_config(vocab)
    found = read_head(save(tmp_path / "whole", config, tensors | more), target.name)
    assert found.layout == "speculators"
    for name, tensor in tensors.items():
        assert torch.equal(found.head.state_dict()[name], tensor)
    assert found.head.config.norm_before_residual is False
    del config["norm_before_residual"]
    assert read_head(save(tmp_path / "unsaid", config, tensors), target.name).head.config.norm_before_residual is True
    with pytest.raises(HeadwayError, match=r"not the embedding of"):
        read_head(save(tmp_path / "own", config, tensors | {"embed_tokens.weight": embedding + 0.1}), target.name)
    config["speculators_model_type"] = "peagle"
    with pytest.raises(HeadwayError, match=r"a peagle head"):
        read_head(save(tmp_path / "peagle", config, tensors), target.name)


def test_a_full_draft_vocabulary_needs_no_map(tmp_path: Path, target: TargetFacts):
    vocab = target.vocab_size
    tensors = eagle3_tensors(vocab, draft=vocab)
    identity = {"d2t": torch.zeros(vocab, dtype=torch.int64), "t2d": torch.ones(vocab, dtype=torch.bool)}
    config = eagle3_config(vocab, draft_vocab_size=vocab)
    assert read_head(save(tmp_path / "a", config, tensors | identity), target.name).head.config.draft_vocab_size is None
    identity["d2t"][:2] = torch.tensor([1, -1])
    with pytest.raises(HeadwayError, match=r"reorders a full vocabulary"):
        read_head(save(tmp_path / "b", config, tensors | identity), target.name)


def change(name: str, new: Any) -> Any:
    return lambda tensors, config: tensors.update({name: new(tensors.get(name))})


FAULTS = {
    r"`norm\.weight` is missing": lambda t, c: t.pop("norm.weight"),
    r"`extra` does not belong": change("extra", lambda _: torch.zeros(2)),
    r"`mask_hidden` does not belong": change("mask_hidden", lambda _: torch.zeros(1, 3 * H)),
    r"`norm\.weight` has shape \[33\]": change("norm.weight", lambda _: torch.ones(H + 1)),
    r"`fc\.weight` is \[32, 64\]: not 3 taps": change("fc.weight", lambda _: torch.ones(H, 2 * H)),
    r"`fc\.weight` holds values that are not finite": change("fc.weight", lambda t: t.fill_(torch.nan)),
    r"`d2t` holds target ids": change("d2t", lambda t: t + torch.arange(D)),
    r"`d2t` gives ids outside": lambda t, c: (t.pop("t2d"), t["d2t"].add_(1000)),
    r"`t2d` does not mark": lambda t, c: t["t2d"].logical_not_(),
    r"`d2t` \[40\] is missing": lambda t, c: t.pop("d2t"),
    r"holds float8_e4m3fn tensors": change("fc.weight", lambda t: t.to(torch.float8_e4m3fn)),
    r"vocabulary of 300": change("t2d", lambda t: torch.nn.functional.pad(t, (0, 12))),
    r"do not make the 32 and 16 rows": lambda t, c: c.update(num_attention_heads=8, head_dim=6),
    r"rope_type 'spiral'": lambda t, c: c.update(rope_scaling={"rope_type": "spiral"}),
    r"two tensors have one meaning": lambda t, c: t.update(
        {"layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"].clone()}
    ),
    r"reads no taps": lambda t, c: c.update(eagle_config={"use_aux_hidden_state": False}),
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, target: TargetFacts, message: str):
    tensors, config = eagle3_tensors(target.vocab_size), eagle3_config(target.vocab_size)
    FAULTS[message](tensors, config)
    save(tmp_path / "head", config, tensors)
    with pytest.raises(HeadwayError, match=message):
        read_head(tmp_path / "head", target.name)
