"""Contenders by name: the right drafter with the right length, and errors that say what would do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eval.contenders import EAGLE_STATIC, EAGLE_TREE, MEDUSA_TREE, MODEL, PLAIN, build, check_name, fits, origin
from eval.drafters.dynamic_tree import DynamicTreeDrafter
from eval.drafters.eagle import EagleDrafter, EagleTreeDrafter
from eval.drafters.lookahead import LookaheadDrafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.medusa import TREE, MedusaDrafter, MedusaTreeDrafter
from eval.drafters.model import ModelDrafter
from eval.drafters.none import NoDrafter
from eval.drafters.suffix import SuffixDrafter
from heads.checkpoint import MANIFEST
from heads.errors import HeadwayError, sha256_file
from heads.medusa import MedusaConfig, MedusaHead
from heads.target import Target
from heads.truncated import truncate
from tests.eval.eagle_heads import make_head


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def head_folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contenders") / "head"
    head = MedusaHead(MedusaConfig(target.hidden_size, target.vocab_size, None, 3))
    head.manifest = {"target": {"name": "tiny", "fingerprint": target.fingerprint}}
    head.save_pretrained(folder)
    paths = {"paths": [[0], [1], [0, 0]], "head_manifest_sha256": sha256_file(folder / MANIFEST)}
    (folder / TREE).write_text(json.dumps(paths))
    return folder


@pytest.fixture(scope="module")
def draft_folder(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contenders") / "first-1"
    truncate(str(tiny_target_dir), 1, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "own", "of_two"),
    [
        ("none", NoDrafter, 0, 0),
        ("lookup", LookupDrafter, 10, 2),
        ("suffix", SuffixDrafter, 16, 2),
        ("suffix-shared", SuffixDrafter, 16, 2),
        ("lookahead", LookaheadDrafter, 56, 28),
    ],
)
def test_drafters_by_name(target: Target, name: str, kind: type, own: int, of_two: int) -> None:
    check_name(name)
    for length, most in ((None, own), (2, of_two)):
        contender = build(name, target, length)
        assert type(contender.drafter) is kind
        assert (contender.name, contender.head, contender.drafter.most_drafts) == (name, None, most)
    assert fits(name, target) is None
    assert origin(name) is None


def test_every_plain_name_is_tested() -> None:
    assert list(PLAIN) == ["none", "lookup", "suffix", "suffix-shared", "lookahead"]


def test_heads_and_models_by_folder(target: Target, head_folder: Path, draft_folder: Path) -> None:
    for name, kind, folder, own, of_two in (
        (str(head_folder), MedusaDrafter, head_folder, 3, 2),
        (f"{MEDUSA_TREE}:{head_folder}", MedusaTreeDrafter, head_folder, 3, 3),
        (f"{MODEL}:{draft_folder}", ModelDrafter, draft_folder, 5, 2),
    ):
        check_name(name)
        for length, most in ((None, own), (2, of_two)):
            contender = build(name, target, length)
            assert type(contender.drafter) is kind
            assert (contender.name, contender.head, contender.drafter.most_drafts) == (name, str(folder), most)
        assert fits(name, target) is None
    draft = build(f"{MODEL}:{draft_folder}", target, None).drafter
    assert isinstance(draft, ModelDrafter)
    assert draft.model.dtype == torch.float64
    assert draft.model.num_layers == 1
    assert origin(f"{MODEL}:{draft_folder}") == {"kind": "draft model", "fingerprint": draft.model.fingerprint}
    assert (origin(f"{MEDUSA_TREE}:{head_folder}") or {})["target"]["fingerprint"] == target.fingerprint


def test_eagle_heads_by_folder(target: Target, tmp_path: Path) -> None:
    """A chain, a dynamic tree with and without a size, a static tree; each with the depth that is asked for."""
    folder = tmp_path / "head"
    make_head("eagle3", target).save_pretrained(folder)
    for name, kind, own, of_two in (
        (str(folder), EagleDrafter, (4, 4), (2, 2)),
        (f"{EAGLE_TREE}:{folder}", DynamicTreeDrafter, (9, 4), (9, 2)),  # on a CPU
        (f"{EAGLE_TREE},k=4,total=24,depth=5:{folder}", DynamicTreeDrafter, (23, 5), (23, 2)),
        (f"{EAGLE_STATIC}:{folder}", EagleTreeDrafter, (4, 2), (3, 1)),
    ):
        if kind is EagleTreeDrafter:
            with pytest.raises(HeadwayError, match="no candidate tree yet"):
                build(name, target, None)
            paths = {"paths": [[0], [1], [2], [0, 0]], "head_manifest_sha256": sha256_file(folder / MANIFEST)}
            (folder / TREE).write_text(json.dumps(paths))
        check_name(name)
        for length, (most, depth) in ((None, own), (1 if kind is EagleTreeDrafter else 2, of_two)):
            drafter = build(name, target, length).drafter
            assert type(drafter) is kind
            assert (drafter.most_drafts, drafter.depth) == (most, depth)
        assert fits(name, target) is None
        assert (origin(name) or {})["target"]["fingerprint"] == target.fingerprint
    with pytest.raises(HeadwayError, match="only Medusa heads draft with such a tree"):
        build(f"{MEDUSA_TREE}:{folder}", target, None)


def test_sizes_of_trees_that_are_none(head_folder: Path, target: Target) -> None:
    for name in (f"{EAGLE_TREE},width=3:x", f"{EAGLE_TREE},k=-1:x", f"{EAGLE_TREE},k:x", f"{MEDUSA_TREE},k=3:x"):
        with pytest.raises(HeadwayError, match=f"'{name.split(',')[1][:-2]}' is no option"):
            check_name(name)
    with pytest.raises(HeadwayError, match="total 1; it must be at least 2"):
        check_name(f"{EAGLE_TREE},total=1:x")
    with pytest.raises(HeadwayError, match="only EAGLE heads draft with such a tree"):
        build(f"{EAGLE_TREE}:{head_folder}", target, None)


def test_names_that_are_nothing(head_folder: Path, tmp_path: Path) -> None:
    for name in ("suffixes", f"{MEDUSA_TREE}:{tmp_path / 'none'}"):
        with pytest.raises(
            HeadwayError,
            match=r"no such folder; .*model:FOLDER, medusa-tree:FOLDER, eagle-tree:FOLDER, eagle-static:FOLDER, none, lookup",
        ):
            check_name(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadwayError, match=r"no config.json there"):
        check_name(f"{MODEL}:{tmp_path / 'empty'}")


def test_a_head_of_another_target_is_named(
    target: Target, draft_folder: Path, head_folder: Path, tmp_path: Path
) -> None:
    other = Target.load(str(draft_folder), dtype="float64", device="cpu")
    for name in (str(head_folder), f"{MEDUSA_TREE}:{head_folder}"):
        assert f"not for '{draft_folder}'" in (fits(name, other) or "")
    MedusaHead(MedusaConfig(8, target.vocab_size)).save_pretrained(tmp_path / "narrow")
    with pytest.raises(HeadwayError, match="its hidden_size is 8, that of target"):
        build(str(tmp_path / "narrow"), target, None)


def test_truncated_model_is_the_first_layers(target: Target, tiny_target_dir: Path, tmp_path: Path) -> None:
    """Its last state is the target's norm over the tap that enters the next layer."""
    truncate(str(tiny_target_dir), 3, tmp_path / "first-3")
    first = Target.load(str(tmp_path / "first-3"), dtype="float64", device="cpu")
    ids = torch.tensor([[5, 9, 200, 31]])
    tap_BTH = target.states(ids, taps=[3]).taps[3]
    torch.testing.assert_close(first.states(ids).last, target.model.model.norm(tap_BTH), rtol=0, atol=1e-12)
    assert first.eos_ids == target.eos_ids
    assert first.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    with pytest.raises(HeadwayError, match="there is something already"):
        truncate(str(tiny_target_dir), 3, tmp_path / "first-3")
    with pytest.raises(HeadwayError, match=r"layers 4: target .* has 4; give a number from 1 to 3"):
        truncate(str(tiny_target_dir), 4, tmp_path / "first-4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-3"]
