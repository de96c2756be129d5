"""The card of a published head: metadata as huggingface_hub takes it, figures per data set, hostile text as text, no local path."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import yaml
from huggingface_hub import ModelCard

from eval.report.text import markdown
from heads.embedded import EMBEDDED
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head
from heads.model_card import Facts, Served, model_card
from heads.private_paths import named_after, paths_in, replace_paths
from heads.proof import Identity, MeasuredReport
from heads.publish import Options, prepare
from heads.staging import EMBEDDED_HUB_ID, stage
from heads.target import TargetEnds
from tests.conftest import save_tiny_target
from tests.heads.foreign import eagle3_head, medusa_head
from tests.heads.hub_repo import problems

HOSTILE = "</b><script>alert(1)</script> | `x` [a](b)\n---\ntags: [evil]\n# *head*"
SHA = "ab" * 32


def make_run(drafter: str = "eagle3", tau: float | None = 2.34567, speed: float | None = 1.5) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "settings": {"draft_length": 4, "temperature": 0.0},
        "prompts": 8,
        "tau": {"micro": tau, "ci95": [2.1, 2.6]},
        "speedup": {"decode": speed, "ci95": None},
        "verdict": "pays",
    }


def make_report(dataset: str = "mt.bench", *runs: dict[str, Any]) -> MeasuredReport:
    content = {
        "target": {"name": "t", "dtype": "bfloat16", "fingerprint": SHA},
        "protocol": {"max_new_tokens": 64},
        "made_by": {"machine": {"cuda": None, "processor": "a processor"}},
    }
    return MeasuredReport(Path("report"), content, runs or (make_run(),), dataset)


CERTIFICATE = {
    "rules": [{"lossless": True}] * 3 + [{"lossless": False}],
    "mutants": [{}] * 22,
    "chi_square": [{}] * 9,
    "greedy": [{"prompts": 8}],
}
FACTS = Facts(
    repo="an-org/a-head",
    revision=None,
    kind="eagle3",
    license="apache-2.0",
    base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    target=EMBEDDED,
    trained_for={"name": EMBEDDED, "fingerprint": "cd" * 32},
    weights_sha256=SHA,
    served=(Served("vllm", ("vllm serve X",), ("a note",)),),
    reports=(("report.json", make_report()),),
    certificate=CERTIFICATE,
)


def metadata(card: ModelCard) -> dict[str, Any]:
    """Read back from the text, without huggingface_hub."""
    _, block, _ = str(card).split("---\n", 2)
    return yaml.safe_load(block)


def test_the_metadata_is_what_the_hub_takes():
    card = model_card(FACTS)
    found = metadata(card)
    assert problems(found) == []
    results = found.pop("model-index")
    assert found == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "library_name": "headway",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", "eagle3", "headway", "vllm"],
    }
    (result,) = results[0]["results"]
    assert results[0]["name"] == "a-head"
    assert (result["task"], result["dataset"]) == (
        {"type": "text-generation"},
        {"name": "mt.bench", "type": "mt.bench"},
    )
    assert [(metric["type"], metric["value"]) for metric in result["metrics"]] == [
        ("tau", 2.3457),
        ("decode_speedup", 1.5),
    ]
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    text = str(card)
    assert "| mt.bench | eagle3, 4 drafts | 2.35 \\[2.10, 2.60\\] | 1.50x | 8 x 64 | 0 | pays |" in text
    assert "Measured on a processor, bfloat16." in text
    assert "3 rules of verification enumerated and exact, 22 wrong ones caught, 9" in text
    assert "without proof" not in text


def test_a_data_set_each_and_figures_that_are_missing():
    reports = (
        ("reports/a/report.json", make_report("a")),
        ("reports/b/report.json", make_report("b", make_run(speed=None), make_run("eagle-tree", None, 2.0))),
    )
    results = metadata(model_card(replace(FACTS, reports=reports)))["model-index"][0]["results"]
    found = {
        each["dataset"]["name"]: [(metric["type"], metric["value"]) for metric in each["metrics"]] for each in results
    }
    assert found == {"a": [("tau", 2.3457), ("decode_speedup", 1.5)], "b": [("tau", 2.3457), ("decode_speedup", 2.0)]}


def test_what_was_not_shown_is_said_plainly():
    def said(**change: Any) -> str:
        return " ".join(str(model_card(replace(FACTS, **change))).split())

    bare = said(reports=(), certificate=None)
    assert "**Published without proof: no report and no certificate came with this head.**" in bare
    assert "how fast it is and that it leaves the model's text as it is" in bare
    assert "model-index" not in bare
    assert "**Published without proof: no certificate came with this head.**" in said(certificate=None)
    assert "**Published without proof: no report came with this head.**" in said(reports=())


def test_hostile_names_are_shown_as_text_and_add_no_metadata():
    """A data set, a drafter and a verdict that try to leave the table, the page and the metadata."""
    run = make_run(HOSTILE) | {"verdict": HOSTILE}
    report = make_report(HOSTILE, run)
    report.content["made_by"]["machine"]["cuda"] = HOSTILE
    trained = {"name": HOSTILE, "fingerprint": HOSTILE}
    card = model_card(replace(FACTS, reports=(("report.json", report),), trained_for=trained))
    found = metadata(card)
    assert found["tags"] == ["speculative-decoding", "draft-head", "eagle3", "headway", "vllm"]
    assert problems(found) == []
    body = str(card).split("---\n", 2)[2]
    assert "<script>" not in body
    assert "\n---\n" not in body
    (row,) = [line for line in body.splitlines() if "alert" in line and line.startswith("| ")]
    assert row.replace(r"\|", "").count("|") == 8
    assert r"\`x\` \[a\](b)" in row


def test_commands_name_the_repository_the_branch_and_the_target():
    text = str(model_card(replace(FACTS, revision="v1")))
    assert "hf download an-org/a-head --revision v1 --include 'vllm/*' --local-dir a-head" in text
    assert 'heads.load_head("an-org/a-head", revision="v1")' in text
    assert f'SpeculativeDecoder.from_pretrained("{EMBEDDED}", folder)' in text
    assert (
        "accelerate launch train/eagle.py --config RECIPE.yaml --target smollm2-135m-instruct --head.parent a-head"
        in text
    )
    assert "Go on training" not in str(model_card(replace(FACTS, kind="medusa")))


# --- what is staged -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    return save_tiny_target(
        tmp_path_factory.mktemp("secret & place") / "my_target", tiny_tokenizer, num_hidden_layers=8
    )


def staged(head: Any, target_dir: Path, folder: Path, layouts: tuple[str, ...], **more: Any) -> dict[str, str]:
    """Publish without proof to a folder: the texts of its files."""
    facts = TargetFacts.load(str(target_dir))
    head.manifest = {"target": {"name": facts.name, "fingerprint": facts.fingerprint}} | more
    head.save_pretrained(folder / "head")
    options = Options(
        folder / "head", "an-org/a-head", layouts, base_model="an-org/base", license="mit", without_proof=True
    )
    out = folder / "out"
    out.mkdir()
    stage(prepare(options), out)
    return {path.relative_to(out).as_posix(): path.read_text("latin-1") for path in out.rglob("*") if path.is_file()}


def test_no_local_path_is_in_any_file(target_dir: Path, tmp_path: Path):
    vocab = TargetFacts.load(str(target_dir)).vocab_size
    recipe = {
        "target": str(target_dir),
        "out": str(tmp_path / "runs" / "x"),
        "data": {"features": str(Path.home() / "secret")},
    }
    layouts = ("vllm", "sglang", "speculators")
    texts = staged(eagle3_head(vocab), target_dir, tmp_path / "eagle3", layouts, recipe=recipe)
    texts |= {
        f"medusa/{name}": text
        for name, text in staged(medusa_head(vocab), target_dir, tmp_path / "m", ("medusa", "vllm")).items()
    }
    for name, text in texts.items():
        for secret in (str(target_dir), str(tmp_path), f"{Path.home()}/"):
            for written in (secret, escape(secret), json.dumps(secret)[1:-1]):
                assert written not in text, name
    assert json.loads(texts["manifest.json"])["target"]["name"] == "an-org/base"
    assert json.loads(texts["manifest.json"])["recipe"] == {
        "target": "an-org/base",
        "out": "x",
        "data": {"features": "secret"},
    }
    verifier = json.loads(texts["speculators/config.json"])["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "an-org/base"
    assert json.loads(texts["medusa/medusa/config.json"])["base_model_name_or_path"] == "an-org/base"
    (line,) = [
        line for line in texts["README.md"].splitlines() if "--speculative-config" in line and "a-head/vllm" in line
    ]
    assert shlex.split(line)[:3] == ["vllm", "serve", "an-org/base"]
    assert texts["sglang/SERVING.md"].startswith("# How to serve this eagle3 head of an-org/base")


def test_the_embedded_target_is_named_by_its_public_id(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A tiny model stands in for the embedded one; what engines read must not name the folder it was converted to."""
    facts = replace(TargetFacts.load(str(target_dir)), name=EMBEDDED)
    monkeypatch.setattr(TargetFacts, "load", classmethod(lambda cls, name: facts))
    ends = TargetEnds.load(str(target_dir), "float32", "cpu")
    monkeypatch.setattr(TargetEnds, "load", classmethod(lambda cls, *_: ends))
    head = eagle3_head(facts.vocab_size)
    head.manifest = {"target": {"name": EMBEDDED, "fingerprint": facts.fingerprint}}
    head.save_pretrained(tmp_path / "head")
    options = Options(tmp_path / "head", "an-org/a-head", ("vllm", "speculators"), without_proof=True)
    publication = prepare(options)
    assert (publication.base_model, publication.license) == (EMBEDDED_HUB_ID, "apache-2.0")
    (tmp_path / "out").mkdir()
    stage(publication, tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        if path.suffix in (".json", ".md"):
            assert str(target_dir) not in path.read_text(), path
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["target"]["name"] == EMBEDDED
    config = json.loads((tmp_path / "out" / "speculators" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct" in (tmp_path / "out" / "vllm" / "SERVING.md").read_text()
    export_head(head, facts, "vllm", tmp_path / "local")
    assert str(target_dir) in (tmp_path / "local" / "SERVING.md").read_text(), "here, engines need the folder"
    assert Identity.of(tmp_path / "head").fingerprint == facts.fingerprint


def test_a_path_is_found_however_it_is_written(tmp_path: Path):
    """In HTML, JSON, JSON within HTML, plotly's scripts and Markdown; a longer name that begins alike is another one."""
    path = "/data/o'ther & <más>/my_head"
    figure = go.Figure(go.Bar(name=f"medusa ({path})", x=[1], y=[2])).to_html(full_html=False, include_plotlyjs=False)
    written = {
        "a.html": f"<p>{escape(path)}</p><pre>{escape(json.dumps({'head': path}))}</pre>{figure}",
        "b.json": json.dumps([path, f"{path}/x", f"{path}-2"]),
        "c.md": f"{path}\n" + markdown_cell(path),
        "d.safetensors": path,
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    replace_paths(tmp_path, {path: "an-org/h"})
    after = {name: (tmp_path / name).read_text(encoding="utf-8") for name in written}
    assert "más" not in after["a.html"] + after["c.md"]
    assert "m\\u00e1s" not in after["a.html"]
    assert after["a.html"].count("an-org/h") + after["a.html"].count(r"an-org\u002fh") == 3
    assert json.loads(after["b.json"]) == ["an-org/h", "an-org/h/x", f"{path}-2"]
    assert after["d.safetensors"] == path


def markdown_cell(text: str) -> str:
    """A label as report.md of eval/measure.py escapes it."""
    plain = markdown.__globals__["_plain"]
    return str(plain(f"medusa ({text})"))


def test_absolute_paths_are_told_from_other_texts():
    value = {"a": ["/x/y", "relative/z", "https://huggingface.co/a", 3, None], "medusa-tree:/w/v": {"b": "/"}}
    assert named_after(paths_in(value)) == {"/x/y": "y", "/w/v": "v"}
