"""Heads that come without papers: a fault that leaves every shape as it should be shows in what is drafted, and the repair names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.checkup.draft_map import ids_by_rows, read_map
from heads.provenance import map_sha256
from tests.conftest import save_tiny_target
from tests.eval.clinic import (
    IDS,
    LAYERS,
    OTHER_TAPS,
    TAPS,
    THETA,
    Clinic,
    Examine,
    without_papers,
    write_config,
    write_tensors,
)


def late(folder: Path) -> None:
    write_config(folder, eagle_config={IDS: list(TAPS)})


def contradicting(folder: Path) -> None:
    """Both keys, neither as the other says; the one that engines read is wrong."""
    write_config(folder, eagle_config={IDS: [tap - 1 for tap in TAPS]}, **{IDS: [tap + 1 for tap in TAPS]})


def absolute(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] += torch.arange(len(tensors["d2t"]))
        del tensors["t2d"]

    write_tensors(folder, change)


def identity(folder: Path) -> None:
    write_tensors(folder, lambda tensors: tensors["d2t"].zero_())


def swapped(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for part in ("0.linear.weight", "0.linear.bias", "1.weight"):
            tensors[f"1.{part}"], tensors[f"2.{part}"] = tensors[f"2.{part}"], tensors[f"1.{part}"]

    write_tensors(folder, change, "medusa_lm_head.safetensors")


@pytest.mark.parametrize(
    ("kind", "to", "plant", "code", "mend"),
    [
        ("eagle3", "vllm", late, "taps", str(list(TAPS))),
        ("eagle3", "vllm", contradicting, "taps", str(list(TAPS))),
        ("eagle3", "vllm", absolute, "d2t_absolute", "subtract"),
        ("eagle3", "speculators", identity, "map_identity", "write offsets"),
        ("eagle3", "vllm", lambda folder: write_config(folder, rope_theta=10000.0), "rope", f"{THETA}"),
        ("eagle3", "vllm", lambda folder: write_config(folder, norm_output=False), "norm_switch", "true"),
        (
            "eagle3",
            "vllm",
            lambda folder: write_config(folder, num_attention_heads=2, num_key_value_heads=1, head_dim=16),
            "head_dim",
            "head_dim 8",
        ),
        ("eagle", "sglang", lambda folder: write_config(folder, rope_theta=10000.0), "rope", f"{THETA}"),
        ("medusa", "medusa", swapped, "heads_swapped", "[0, 2, 1]"),
    ],
    ids=["late", "contradicting", "absolute", "identity", "rope", "norm", "head_dim", "eagle1-rope", "swapped"],
)
def test_a_fault_without_papers(
    clinic: Callable[[str], Clinic],
    diagnose: Examine,
    tmp_path: Path,
    kind: str,
    to: str,
    plant: Callable[[Path], None],
    code: str,
    mend: str,
):
    ward = clinic(kind)
    folder = without_papers(ward.export(kind, to, tmp_path / "head"))
    plant(folder)
    said = diagnose(folder, target=str(ward.folder))
    assert (said.codes, said.errors, said.exit_code) == ([code], [code], 1)
    assert mend in said.finding(code)["mend"]
    promised = ward.heads[kind].manifest["best"]["replayed_tau"]
    probe = said.report["probe"]
    assert probe["promised"] is None
    assert probe["mended"]["tau"] >= promised - 1e-6
    assert probe["as_served"] is None or probe["as_served"]["tau"] < probe["mended"]["tau"] - 0.3


def test_case_19_the_aux_layers_are_missing_from_the_config(
    clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path
):
    """The server would be healthy. With papers they say what is wrong, without them the drafts do."""
    ward = clinic("eagle3-taps")
    folder = ward.export("eagle3-taps", "vllm", tmp_path / "head")
    assert diagnose(folder).codes == []
    write_config(folder, **{IDS: ..., "eagle_config": ..., "num_aux_hidden_states": ...})
    said = diagnose(folder)
    assert (said.codes, said.exit_code) == (["taps_missing"], 1)
    assert str(list(TAPS)) in said.finding("taps_missing")["what"]
    assert str(list(OTHER_TAPS)) in said.finding("taps_missing")["mend"]
    probe = said.report["probe"]
    assert probe["as_served"]["tau"] < probe["mended"]["tau"] == pytest.approx(probe["promised"])
    said = diagnose(without_papers(folder), target=str(ward.folder))
    assert (said.codes, said.exit_code) == (["taps_missing"], 1)
    assert str(list(OTHER_TAPS)) in said.finding("taps_missing")["mend"]


def test_a_head_dim_that_does_not_make_the_rows(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    """The file is right: 32 and 16 rows are four heads and two key-value heads of size 8."""
    ward = clinic("eagle3")
    folder = without_papers(ward.export("eagle3", "vllm", tmp_path / "head"))
    write_config(folder, head_dim=16)
    said = diagnose(folder, target=str(ward.folder))
    assert (said.codes, said.exit_code) == (["head_dim"], 1)
    assert said.finding("head_dim")["mend"] == "write `head_dim` 8"
    assert said.report["probe"]["mended"]["tau"] > 2


def test_two_faults_at_once(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    ward = clinic("eagle3")
    folder = without_papers(ward.export("eagle3", "vllm", tmp_path / "head"))
    late(folder)
    write_config(folder, rope_theta=10000.0)
    assert diagnose(folder, target=str(ward.folder)).codes == ["rope", "taps"]


def test_the_embedding_in_the_file_tells_another_target(
    clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path
):
    ward = clinic("eagle3")
    folder = without_papers(ward.export("eagle3", "speculators", tmp_path / "head"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": THETA}
    tokenizer = ward.target.tokenizer
    other = save_tiny_target(tmp_path / "o", tokenizer, seed=5, num_hidden_layers=LAYERS, rope_parameters=rope)
    said = diagnose(folder, target=str(other))
    assert (said.codes, said.exit_code) == (["other_target"], 1)
    assert "embed_tokens" in said.finding("other_target")["where"]


IDS_D = torch.tensor([2, 3, 7, 9])
OFFSETS_D = IDS_D - torch.arange(4)
MARKS_V = torch.zeros(12, dtype=torch.bool).index_fill(0, IDS_D, True)


@pytest.mark.parametrize(
    ("named", "trained", "code", "meant"),
    [
        ({"d2t": OFFSETS_D, "t2d": MARKS_V}, None, None, IDS_D),
        ({"d2t": OFFSETS_D}, None, None, IDS_D),
        ({"d2t": IDS_D, "t2d": MARKS_V}, None, "d2t_absolute", IDS_D),
        ({"d2t": IDS_D}, map_sha256(IDS_D), "d2t_absolute", IDS_D),
        ({"d2t": IDS_D + 2}, None, "d2t_absolute", IDS_D + 2),  # 11 + 3 is no token
        (
            {"d2t": torch.tensor([1, 2, 3, 5])},
            None,
            None,
            torch.tensor([1, 3, 5, 8]),
        ),  # the probe tries what else it could be
        ({"d2t": OFFSETS_D * 0, "t2d": MARKS_V}, None, "map_identity", IDS_D),
        ({"t2d": MARKS_V}, None, "map_identity", IDS_D),
        ({}, None, "map_identity", None),
        ({"d2t": OFFSETS_D * 0}, map_sha256(torch.arange(4)), None, torch.arange(4)),
        ({"token_map": torch.arange(4)}, map_sha256(IDS_D), "map_identity", None),
        ({"token_map": IDS_D}, map_sha256(IDS_D), None, IDS_D),
        ({"d2t": OFFSETS_D[:3]}, None, "map", None),
        ({"d2t": OFFSETS_D.flip(0), "t2d": MARKS_V}, None, "map", IDS_D),
        ({"d2t": OFFSETS_D, "t2d": MARKS_V.roll(1)}, map_sha256(IDS_D), "map", IDS_D),
    ],
)
def test_maps(named: dict[str, Tensor], trained: str | None, code: str | None, meant: Tensor | None):
    found = read_map(named, 4, 12, trained, "file")
    assert [finding.code for finding in found.findings] == ([] if code is None else [code])
    assert (None if found.meant_D is None else found.meant_D.tolist()) == (None if meant is None else meant.tolist())
    assert all(finding.mended == (meant is not None) for finding in found.findings)


def test_a_map_that_is_not_there_can_be_read_off_the_rows():
    """Of an output that began as rows of the target's, with noise; no map is made of rows that are like none."""
    generator = torch.Generator().manual_seed(0)
    target_VH = torch.randn(12, 64, generator=generator)
    noise_DH = torch.randn(4, 64, generator=generator)
    found = ids_by_rows(3 * target_VH[IDS_D] + 0.5 * noise_DH, target_VH)
    assert found is not None
    assert found.tolist() == IDS_D.tolist()
    assert ids_by_rows(noise_DH, target_VH) is None
