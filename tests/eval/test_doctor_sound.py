"""The doctor has nothing to say about sound heads, in any layout, with papers or without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.checkup import examine as examination
from eval.checkup.patient import Patient
from heads.formats.layouts import read_head
from tests.eval.clinic import STEPS, Clinic, Examine, without_papers

LAYOUTS = [
    ("eagle3", "ours"),
    ("eagle3", "vllm"),
    ("eagle3", "sglang"),
    ("eagle3", "speculators"),
    ("eagle", "ours"),
    ("eagle", "vllm"),
    ("eagle", "sglang"),
    ("medusa", "ours"),
    ("medusa", "vllm"),
    ("medusa", "medusa"),
    ("medusa-shared", "ours"),
    ("medusa-shared", "vllm"),
]


@pytest.mark.parametrize(("kind", "to"), LAYOUTS)
def test_a_sound_head(
    clinic: Callable[[str], Clinic],
    diagnose: Examine,
    tmp_path: Path,
    kind: str,
    to: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Nothing is found, what is drafted is what was promised, and the head that is probed is the strict reader's."""
    ward = clinic(kind)
    folder = ward.export(kind, to, tmp_path / "head")
    probed: list[Patient] = []
    real = examination.assemble

    def keep(*arguments: object) -> Patient:
        probed.append(real(*arguments))  # type: ignore[arg-type]
        return probed[-1]

    monkeypatch.setattr(examination, "assemble", keep)
    said = diagnose(folder)
    assert (said.report["findings"], said.exit_code, said.report["sound"]) == ([], 0, True)
    probe = said.report["probe"]
    promised = ward.heads[kind].manifest["best"]["replayed_tau"]
    assert promised > 2.0
    assert probe["promised"] == promised
    assert probe["floor"] == pytest.approx(1 + 0.5 * (promised - 1))
    assert probe["as_served"]["tau"] == pytest.approx(promised) == probe["mended"]["tau"]
    assert len(probe["as_served"]["by_step"]) == STEPS
    expected = read_head(folder).head
    for patient in probed:
        built = patient.build(folder)
        assert built.config == expected.config
        for name, tensor in expected.state_dict().items():
            assert torch.equal(built.state_dict()[name], tensor), name
    if to == "ours":
        return
    said = diagnose(without_papers(folder), target=str(ward.folder))
    assert (said.report["findings"], said.exit_code) == ([], 0)
    assert said.report["probe"]["promised"] is None
    assert said.report["probe"]["as_served"]["tau"] >= promised - 1e-6  # chains of 4 where nobody says how long


def test_a_pickled_head_and_half_precision(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    folder = without_papers(clinic("eagle3").export("eagle3", "vllm", tmp_path / "head"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    said = diagnose(folder, target=str(clinic("eagle3").folder))
    assert (said.codes, said.exit_code) == ([], 0)
    half = clinic("eagle3").export("eagle3", "vllm", tmp_path / "half", "float16")
    said = diagnose(half)
    assert (said.codes, said.exit_code) == ([], 0)
    assert said.report["probe"]["mended"]["tau"] > 2.0
