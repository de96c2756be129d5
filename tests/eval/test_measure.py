"""The measurement as a user runs it, on the tiny target: its protocol, its report, its exit codes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from eval import identity, measure, protocol
from eval.contenders import Contender
from eval.decode import Settings
from eval.drafters.none import NoDrafter
from eval.ledger import Ledger, Output, Round
from eval.progress import Steps
from eval.prompts import read_prompts
from heads import MedusaHead
from heads.checkpoint import save_head
from heads.errors import HeadwayError, run_script
from heads.medusa import MedusaConfig
from heads.target import Target, fingerprint
from tests.eval.test_report import SHAPE, check_shape

COUNT, REPEATS = 2, 2
SIZES = f"--count {COUNT} --repeats {REPEATS} --max_new_tokens 6 --identity_prompts 1 --identity_tokens 5".split()


def save_tiny_head(folder: Path, target: Path, name: str = "tiny") -> Path:
    """A Medusa head of two random heads, whose manifest says it was trained for `target`."""
    config = json.loads((target / "config.json").read_text())
    head = MedusaHead(MedusaConfig(config["hidden_size"], config["vocab_size"], num_heads=2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    save_head(head, folder, {"target": {"name": name, "fingerprint": fingerprint(target)}})
    return folder


@pytest.fixture(scope="module")
def tiny_head(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    return save_tiny_head(tmp_path_factory.mktemp("heads") / "medusa", tiny_target_dir)


@pytest.fixture(scope="module")
def tiny_target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), "float32", "cpu")


@pytest.fixture
def script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_target_dir: Path, tiny_conversations: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs measure.py's main with the tiny target and conversations: exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        common = ["--target", tiny_target_dir, "--prompts", tiny_conversations, "--device", "cpu", *SIZES]
        monkeypatch.setattr(sys, "argv", ["measure.py", *map(str, common), *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run_script(measure.main)
        captured = capsys.readouterr()
        return int(str(stopped.value.code)), captured.out, captured.err

    return run


def test_a_measurement_writes_a_report_of_schema_1(script: Any, tiny_head: Path, tmp_path: Path) -> None:
    code, shown, errors = script(
        "--head", tiny_head, "--head", "lookup", "--dtype", "float32", "--out", tmp_path / "report"
    )
    assert (code, errors) == (0, "")
    assert "decode speedup" in shown
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    check_shape(report, SHAPE)
    assert [run["drafter"] for run in report["runs"]] == ["none", "medusa", "lookup"]
    none, medusa, lookup = report["runs"]
    assert none["tau"]["micro"] == none["speedup"]["decode"] == 1.0
    assert (medusa["head"], lookup["head"]) == (str(tiny_head), None)
    weights = sha256((tiny_head / "model.safetensors").read_bytes()).hexdigest()
    assert report["made_by"]["weights_sha256"] == {str(tiny_head): weights}
    assert medusa["settings"]["draft_length"] == 2
    for run in report["runs"]:
        assert run["lossless"]["greedy_identical"]
        assert run["lossless"]["divergences"] == []
        assert run["prompts"] == COUNT
        assert run["tokens"] == none["tokens"], "greedy in fp32: the same texts"
        # every round is one pass of the target: emitted tokens and prefill tokens make up the outputs
        assert run["tau"]["micro"] * run["rounds"] + COUNT * REPEATS == pytest.approx(run["tokens"])
        assert sum(index * count for index, count in enumerate(run["emitted"])) == run["tokens"] - COUNT * REPEATS
    assert report["protocol"]["calibration"]["apart"]
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.html", "report.json", "report.md"]


def test_bf16_texts_that_part_are_listed_with_their_margins(script: Any, tiny_head: Path, tmp_path: Path) -> None:
    code, _, _ = script("--head", tiny_head, "--dtype", "bfloat16", "--out", tmp_path / "report")
    assert code == 0, "bf16 may part; identity is a matter of fp32"
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["target"]["dtype"] == "bfloat16"
    for run in report["runs"]:
        assert run["lossless"]["divergences_checked"]
        assert all(found["margin"] < 0.1 for found in run["lossless"]["divergences"])


def test_ids_that_differ_in_fp32_give_exit_code_1_and_a_report(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(identity, "generate", lambda target, ids, tokens: [1, 2, 3])
    code, shown, errors = script("--head", "lookup", "--out", tmp_path / "report")
    assert code == 1
    assert errors.count("\n") == 1
    assert "greedy ids differ" in errors
    assert "NO" in shown
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert not report["runs"][1]["lossless"]["greedy_identical"]


BAD_ROWS = {
    "malformed JSON": ("{bad", "line 7"),
    "no prompt": ('{"text": "hello"}', "line 7"),
    "not an object": ("[1, 2]", "line 7"),
    "no user turn": ('{"messages": [{"role": "assistant", "content": "hello"}]}', "line 7"),
    "content that is no text": ('{"messages": [{"role": "user", "content": 7}]}', "line 7"),
    "not UTF-8": ('{"question": "\udcff"}', "line 7"),
    "too long": (json.dumps({"question": "the cat sat " * 300}), "line 7"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_one_line_naming_file_and_row(script: Any, kind: str, tmp_path: Path) -> None:
    row, where = BAD_ROWS[kind]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"question": "the cat"}\n' * 6 + row.encode("utf-8", "surrogateescape") + b"\n")
    code, _, errors = script("--head", "lookup", "--prompts", prompts, "--count", "9", "--out", tmp_path / "report")
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert f"{prompts}, {where}" in errors
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompts", "EMPTY"], "no rows"),
        (["--head", "no-such-head"], "no-such-head"),
        (["--head", "EMPTY_FOLDER"], "manifest.json"),
        (["--count", "0"], "--count 0"),
        (["--repeats", "-1"], "--repeats -1"),
        (["--draft_length", "0"], "--draft_length 0"),
        (["--draft_length", "3"], "1 to 2"),
        (["--temperature", "-0.5"], "temperature"),
        (["--top_p", "1.5"], "top_p"),
        (["--dtype", "int7"], "dtype"),
        (["--lenght", "3"], "lenght"),
        (["--out", "FILE"], "is a file"),
        (["--target", "EMPTY_FOLDER"], "config.json"),
    ],
)
def test_bad_options_are_one_line_and_nothing_is_written(
    script: Any, tiny_head: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    stands = {"EMPTY": tmp_path / "empty", "FILE": tmp_path / "empty", "EMPTY_FOLDER": tmp_path / "folder"}
    given = [stands.get(argument, argument) for argument in arguments]
    out = [] if "--out" in arguments else ["--out", tmp_path / "report"]
    code, _, errors = script("--head", tiny_head, *out, *given)
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert said in errors
    assert not (tmp_path / "report").exists()
    assert (tmp_path / "empty").read_text() == ""


def test_a_head_of_another_target_is_refused_naming_both_or_warned_about(
    script: Any, tiny_head: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """The target was fine-tuned after the head was trained."""
    manifest = json.loads((tiny_head / "manifest.json").read_text())
    manifest["target"] = {"name": "the-old-one", "fingerprint": "f" * 64}
    stale = tmp_path / "stale"
    stale.mkdir()
    for name in ("config.json", "model.safetensors"):
        (stale / name).write_bytes((tiny_head / name).read_bytes())
    (stale / "manifest.json").write_text(json.dumps(manifest))
    code, _, errors = script("--head", stale, "--out", tmp_path / "report")
    assert code == 2
    for text in ("the-old-one", "f" * 16, str(tiny_target_dir), fingerprint(tiny_target_dir)[:16]):
        assert text in errors
    assert not (tmp_path / "report").exists()
    code, shown, _ = script("--head", stale, "--out", tmp_path / "report", "--allow_other_target")
    assert code == 0
    assert "warning" in shown


def test_prompts_come_from_conversations_turns_and_questions(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": "d"}]},
        {"turns": ["the cat", "the moon"]},
        {"question": "12 dogs", "answer": "no"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    found = read_prompts(path, tiny_target)
    assert [prompt.messages for prompt in found] == [
        turns,
        [{"role": "user", "content": "the cat"}],
        [{"role": "user", "content": "12 dogs"}],
    ]
    assert found[2].source == f"{path}, line 5"
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert found[1].ids == tiny_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_divergence_is_the_first_one_and_its_margin_that_of_the_model(
    tiny_target: Target, tiny_target_dir: Path
) -> None:
    prompt = [5, 6, 7, 8]
    baseline = Ledger([], [Output(0, [1, 2, 3, 4], 0.1, None), Output(0, [1, 2, 3, 4], 0.1, None)])
    run = Ledger([], [Output(0, [1, 2, 9, 4], 0.1, None), Output(0, [7, 2, 3, 4], 0.1, None)])
    (found,) = identity.divergences(tiny_target, [prompt], run, baseline)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, 1, 2]])).logits[0, -1].sort(descending=True).values
    assert (found["prompt"], found["position"]) == (0, 2)
    assert found["margin"] == pytest.approx(float(logits[0] - logits[1]), abs=1e-4)
    assert identity.divergences(tiny_target, [prompt], baseline, baseline) == []


def test_runs_are_warmed_up_calibrated_before_and_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the loop is written down; a calibration round costs 1 s, a measured one 5 s."""
    calls: list[tuple[str, int, int]] = []

    def decode(
        target: Any, drafter: NoDrafter, prompts: Sequence[list[int]], settings: Settings, controller: None
    ) -> Ledger:
        calls.append((drafter.name, prompts[0][0], settings.max_new_tokens))
        pace = {"none": 1.0, "fast": 0.5}[drafter.name] * (1 if settings.max_new_tokens == 16 else 5)
        return Ledger([Round(0, 1, 0, 0, 1, "length", 0.0, pace, 0.0)], [Output(0, [1, 2], 0.1, "length")])

    monkeypatch.setattr(protocol, "decode", decode)
    monkeypatch.setattr(protocol, "CALIBRATION_TOKENS", 16)
    fast = NoDrafter()
    fast.name = "fast"
    contenders = [Contender("none", NoDrafter(), None), Contender("fast", fast, None)]
    plan = protocol.Plan([[10], [11], [12]], [[20], [21]], Settings(max_new_tokens=40), repeats=2)
    target: Any = None
    with Steps(plan.work(2), Console(file=io.StringIO())) as steps:
        found = protocol.run(target, contenders, plan, steps)

    warm, rest = calls[:10], calls[10:]
    assert {(name, prompt) for name, prompt, _ in warm} == {
        (name, prompt) for name in ("none", "fast") for prompt in (10, 11, 12, 20, 21)
    }
    assert [prompt for _, prompt, _ in rest] == [20, 20, 21, 21] + [10, 10, 11, 11, 12, 12] * 2
    pairs = [(rest[i][0], rest[i + 1][0]) for i in range(0, len(rest), 2)]
    assert all(set(pair) == {"none", "fast"} for pair in pairs), "both on a prompt before the next prompt"
    assert [first for first, _ in pairs[2:]] == ["none", "fast", "none", "fast", "none", "fast"]
    cost = found.costs["fast"]
    assert cost is not None
    assert cost.total == pytest.approx(0.5), "from the calibration"
    assert len(found.ledgers["fast"].rounds) == 6


def test_progress_lines_tell_share_and_time_left() -> None:
    out = io.StringIO()
    with Steps(10, Console(file=out, width=120)) as steps:
        steps.heading("first")
        steps.advance(5)
        steps.heading("second")
    assert "first: 0 %" in out.getvalue()
    assert "second: 50 %" in out.getvalue()
    assert "s left" in out.getvalue()


def test_run_script_reports_a_user_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise HeadwayError("file x,\nline 3: wrong; mend it")

    with pytest.raises(SystemExit) as stopped:
        run_script(fail)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: file x, line 3: wrong; mend it\n"
