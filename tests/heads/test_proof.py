"""What publish.py refuses before anything is written or sent: missing proofs, those of others, a target nobody can find."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heads import load_head, staging
from heads.errors import HeadwayError
from heads.proof import Identity, read_report
from tests.conftest import save_tiny_target
from tests.heads.foreign import eagle3_head, medusa_head
from tests.heads.hub_server import HubServer
from tests.heads.published import BASE, REPO, Proved, changed, make_proved, run, save_trained, use


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any, tiny_conversations: Path) -> Proved:
    folder = tmp_path_factory.mktemp("proved")
    target = save_tiny_target(folder / "target", tiny_tokenizer, num_hidden_layers=8)
    return make_proved(folder, target, tiny_conversations)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs publish.py, which must refuse; its text. No request is made and nothing is staged."""
    hub = HubServer()
    use(hub, monkeypatch, tmp_path / "cache")

    def start(*arguments: Any) -> str:
        with pytest.raises(HeadwayError) as caught:
            run(monkeypatch, *arguments)
        assert not hub.requests
        return str(caught.value)

    yield start
    hub.close()


def test_without_proof_it_must_be_said(proved: Proved, refused: Callable[..., str]):
    bare = ["--head", proved.head, "--repo", REPO, "--base_model", BASE, "--license", "mit"]
    for given in ([], ["--report", proved.report], ["--certificate", proved.certificate]):
        assert "or --without_proof, which the model card will say" in refused(*bare, *given)


def edited(report: dict[str, Any], part: str, **values: Any) -> None:
    report[part].update(values)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        (
            "report",
            lambda r: edited(r, "target", fingerprint="f" * 64),
            "made with target .*ffffffffffff.*measure this head",
        ),
        ("report", lambda r: edited(r, "made_by", weights_sha256={}), "no run in it is of the head in"),
        ("report", lambda r: r["runs"].pop(1), "no run in it is of the head in"),
        (
            "report",
            lambda r: r["runs"][1]["lossless"].update(greedy_identical=False),
            "greedy ids of this head differ in fp32",
        ),
        ("report", lambda r: r.pop("runs"), "not a whole report"),
        ("certificate", lambda c: edited(c, "target", fingerprint="f" * 64), "made with target"),
        ("certificate", lambda c: edited(c, "head", weights_sha256="0" * 64), "was made for other weights"),
        ("certificate", lambda c: c.update(head=None, target=None), "proves the rules alone"),
        ("certificate", lambda c: c.pop("head"), "does not say for which head"),
        ("certificate", lambda c: c["failed"].append("mutant 'x' survived"), "mutant 'x' survived"),
        ("certificate", lambda c: c["greedy"].clear(), "leaves something out"),
        ("certificate", lambda c: c.pop("rules"), "not a whole certificate"),
    ],
)
def test_proofs_of_another_head_or_target_and_failed_ones_are_refused(
    proved: Proved, refused: Callable[..., str], tmp_path: Path, part: str, change: Any, says: str
):
    text = refused(*changed(proved, tmp_path, part, change).arguments())
    assert f"{part}.json: " in text
    assert re.search(says, text), text
    assert refused(*changed(proved, tmp_path / "again", part, change).arguments("--without_proof")) != "", (
        "a false proof stays one"
    )


def test_another_head_of_the_same_target_does_not_get_its_proofs(
    proved: Proved, refused: Callable[..., str], tmp_path: Path
):
    head = load_head(proved.head)
    head.get_parameter("fc.weight").data[0, 0] += 1
    head.save_pretrained(tmp_path / "head")
    assert "no run in it is of the head" in refused(*replace(proved, head=tmp_path / "head").arguments())


def test_a_report_without_hashes_is_matched_by_the_manifest(proved: Proved, tmp_path: Path):
    def strip(report: dict[str, Any]) -> None:
        del report["made_by"]["weights_sha256"]

    old = changed(proved, tmp_path, "report", strip)
    assert [run["head"] for run in read_report(old.report, Identity.of(old.head)).runs] == [str(proved.head)]
    save_trained(load_head(proved.head), tmp_path / "head", proved.target, seed=1)
    with pytest.raises(HeadwayError, match=r"no run in it is of the head"):
        read_report(old.report, Identity.of(tmp_path / "head"))


@pytest.mark.parametrize("name", ["report.json", "report.md", "report.html"])
def test_files_that_are_missing_or_damaged(proved: Proved, refused: Callable[..., str], tmp_path: Path, name: str):
    report = tmp_path / "report"
    shutil.copytree(proved.report, report)
    (report / name).unlink()
    assert f"{report / name}: no such file" in refused(*replace(proved, report=report).arguments())
    assert "certificate.json: no such file" in refused(*replace(proved, certificate=report).arguments())
    (report / name).write_text("{")
    if name == "report.json":
        assert "report.json: not JSON" in refused(*replace(proved, report=report).arguments())


def test_a_target_that_nobody_else_can_find_and_other_options(
    proved: Proved, refused: Callable[..., str], tmp_path: Path
):
    proofs = ["--report", proved.report, "--certificate", proved.certificate]
    here = ["--head", proved.head, "--repo", REPO, *proofs]
    assert f"was trained for '{proved.target}', a folder here; give --base_model" in refused(*here, "--license", "mit")
    assert "give --license" in refused(*here, "--base_model", BASE)
    assert "give --license" in refused(*here, "--base_model", BASE, "--license", "mit\ntags: [x]")
    assert "'/tmp/x': no name on the Hub" in refused(*here, "--license", "mit", "--base_model", "/tmp/x")
    assert "'no-organisation': no name on the Hub" in refused(*proved.arguments("--repo", "no-organisation"))
    assert "give the name of a branch" in refused(*proved.arguments("--revision", "a b"))
    assert "no such folder" in refused(*proved.arguments("--head", tmp_path / "nowhere"))
    assert "see --help" in refused(*proved.arguments("--layouts", "ollama"))
    assert "see --help" in refused(*proved.arguments("--private", "--public"))
    assert "see --help" in refused(*proved.arguments("--token", "hf_abc"))


def test_a_head_that_a_layout_cannot_carry_or_of_another_target(
    proved: Proved, refused: Callable[..., str], tmp_path: Path, tiny_tokenizer: Any
):
    vocab = json.loads((proved.target / "config.json").read_text())["vocab_size"]
    save_trained(medusa_head(vocab), tmp_path / "medusa", proved.target)
    bare = ["--repo", REPO, "--base_model", BASE, "--license", "mit", "--without_proof"]
    assert "takes eagle3" in refused("--head", tmp_path / "medusa", *bare, "--layouts", "speculators")
    other = save_tiny_target(tmp_path / "other", tiny_tokenizer, seed=1, num_hidden_layers=8)
    assert "give --target the right one" in refused(*proved.arguments("--layouts", "vllm", "--target", other))
    eagle3_head(vocab).save_pretrained(tmp_path / "unknown")
    assert "names no target with its fingerprint" in refused("--head", tmp_path / "unknown", *bare)
    assert staging.EMBEDDED_HUB_ID == "HuggingFaceTB/SmolLM2-135M-Instruct"
