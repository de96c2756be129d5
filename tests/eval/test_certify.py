"""The certificate: its figures, what the decode loop adds to the proof, and the loop's own accounts (cases.md 22, 25)."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import certify, chi_square, identity
from eval.chi_square import SETTINGS, BigramDrafter, Subject
from eval.chooser import Chooser
from eval.decode import Settings, decode
from eval.drafters import Committed, Drafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.none import NoDrafter
from eval.experiments import CHAIN, SMALL_TREE
from eval.sampling import Sampling
from eval.tree import DraftTree
from heads.errors import HeadwayError, run_script
from heads.target import Target, fingerprint
from tests.eval.test_measure import save_tiny_head

KEYS = {
    "rules": {"name", "lossless", "max_deviation"},
    "mutants": {"name", "killed", "max_deviation"},
    "chi_square": {"drafter", "settings", "p_value", "draws"},
    "greedy": {"dtype", "prompts", "identical", "divergences"},
}


class TextDrafter:
    """Drafts a chain from a given continuation of its one prompt."""

    name, taps = "text", ()

    def __init__(self, prompt: list[int], text: list[int], length: int) -> None:
        self.prompt, self.text, self.most_drafts, self.depth = prompt, text, length, length

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        pass

    def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
        done = len(sequences[0]) - len(self.prompt)
        return DraftTree.chain(root_B, torch.tensor([self.text[done : done + self.most_drafts]], dtype=torch.int64))


@pytest.fixture(scope="module")
def tiny_target(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), "float64", "cpu")


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return chi_square.tiny_target(tmp_path_factory.mktemp("eight"))


# --- chi-square through the loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loops_tokens_have_the_targets_law(eight: Target, name: str) -> None:
    """Draws are rows of a batch; a sampled chain, so that acceptance, residual and bonus token all take part."""
    subject = Subject("sampled chain", BigramDrafter(eight, CHAIN))
    p_value = chi_square.test(eight, subject, SETTINGS[name], draws=2000, seed=1)
    print(f"sampled chain, {name}: p = {p_value:.3f}")
    assert p_value > chi_square.SIGNIFICANT


@pytest.mark.parametrize(
    ("name", "rule", "drafter"),
    [
        ("block", "block", lambda target: BigramDrafter(target, CHAIN)),
        ("match", "match", lambda target: BigramDrafter(target, CHAIN)),
        ("i.i.d. tree", None, lambda target: BigramDrafter(target, SMALL_TREE)),
        ("tree without replacement", None, lambda target: BigramDrafter(target, SMALL_TREE, replacement=False)),
        ("lookup", None, lambda target: LookupDrafter(3, 2)),
        ("none", None, lambda target: NoDrafter()),
    ],
)
def test_every_rule_in_the_loop(
    eight: Target, name: str, rule: str | None, drafter: Callable[[Target], Drafter]
) -> None:
    subject = Subject(name, drafter(eight), rule)
    p_value = chi_square.test(eight, subject, SETTINGS["penalties"], draws=2000, seed=2)
    print(f"{name}, penalties: p = {p_value:.3f}")
    assert p_value > chi_square.SIGNIFICANT


def test_typical_acceptance_does_not_pass(eight: Target) -> None:
    subject = Subject("typical", LookupDrafter(3, 2), "typical_lossy")
    assert chi_square.test(eight, subject, SETTINGS["temperature 1"], draws=2000, seed=3) < chi_square.SIGNIFICANT


def test_a_planted_fault_of_one_percent_is_detected() -> None:
    """And the same number of draws without the fault passes."""
    entry = certify.plant_fault(seed=0)
    print(entry["name"])
    assert entry["killed"]
    assert entry["max_deviation"] == 0.01


def test_no_fault_no_alarm(eight: Target) -> None:
    subject, sampling = Subject("sampled chain", BigramDrafter(eight, CHAIN)), SETTINGS["temperature 1"]
    found_S = chi_square.counts(eight, subject, sampling, chi_square.FAULT_DRAWS, seed=0, tokens=3)
    assert chi_square.p_value(found_S, chi_square.exact_law(eight, sampling, 3)) > chi_square.SIGNIFICANT


def test_the_p_value_is_uniform_under_the_law_and_zero_for_the_impossible() -> None:
    """Multinomial counts of the law itself: about 5 % of the p-values lie below 0.05."""
    generator = torch.Generator().manual_seed(0)
    law_S = torch.rand(40, generator=generator, dtype=torch.float64) ** 3
    law_S /= law_S.sum()
    p_values = []
    for _ in range(400):
        drawn = torch.multinomial(law_S, 1500, replacement=True, generator=generator)
        p_values.append(chi_square.p_value(torch.bincount(drawn, minlength=40).double(), law_S))
    assert 0.02 < sum(p < 0.05 for p in p_values) / 400 < 0.09
    assert 0.4 < sum(p_values) / 400 < 0.6
    impossible_S = torch.tensor([10.0, 1.0], dtype=torch.float64)
    assert chi_square.p_value(impossible_S, torch.tensor([1.0, 0.0], dtype=torch.float64)) == 0.0


# --- the same seed, the same text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SETTINGS["temperature 0.7"], SETTINGS["penalties"]], ids=["plain", "penalties"])
def test_a_seed_gives_the_same_text_with_and_without_drafts_and_neighbours(
    tiny_target: Target, sampling: Sampling
) -> None:
    """Sampled decoding: coins belong to output positions, so drafts chosen without sampling save passes and no more."""
    source = random.Random(0)
    prompts = [[source.randrange(3, 288) for _ in range(length)] for length in (5, 2, 9)]
    settings = Settings(max_new_tokens=20, sampling=sampling, seed=11, stop_ids=())
    plain = [output.ids for output in decode(tiny_target, NoDrafter(), prompts, settings).outputs]
    assert len({tuple(ids) for ids in plain}) == 3
    assert [o.ids for o in decode(tiny_target, LookupDrafter(4, 1), prompts, settings).outputs] == plain
    alone = decode(tiny_target, NoDrafter(), prompts[:1], settings).outputs[0].ids
    assert alone == plain[0]
    drafted = decode(tiny_target, TextDrafter(prompts[0], plain[0], 4), prompts[:1], settings)
    assert drafted.outputs[0].ids == alone
    assert all(row.accepted == min(4, row.drafted) for row in drafted.rounds), "the right text is accepted whole"


# --- cases.md -----------------------------------------------------------------------------------------------------------


def test_case_22_a_stop_token_inside_the_accepted_prefix(tiny_target: Target) -> None:
    """[a, b, EOS, d, e, bonus]: 5 verified, 3 emitted, reported apart, and sum(emitted) + 1 == len(output)."""
    prompt = [7, 50, 200]
    long = decode(tiny_target, NoDrafter(), [prompt], Settings(max_new_tokens=12, stop_ids=())).outputs[0].ids
    position = next(index for index in range(3, 8) if long[index] not in long[:index])
    lead = long[: position - 2]  # what comes before a, b, EOS is put into the prompt
    settings = Settings(max_new_tokens=12, stop_ids=(long[position],))
    drafter = TextDrafter([*prompt, *lead[:-1]], long[len(lead) - 1 :], 5)
    ledger = decode(tiny_target, drafter, [[*prompt, *lead[:-1]]], settings)
    ledger.check()
    assert [(row.drafted, row.accepted, row.emitted, row.stop) for row in ledger.rounds] == [(5, 5, 3, "eos")]
    assert ledger.outputs[0].ids == long[len(lead) - 1 : position + 1]
    assert sum(row.emitted for row in ledger.rounds) + 1 == len(ledger.outputs[0].ids) == 4


def test_case_25_identity_in_fp32_and_a_margin_for_each_divergence_below(tiny_target_dir: Path) -> None:
    """Texts that part in bf16 do so where the target's two best logits are close, and the certificate says how close."""
    source = random.Random(5)
    prompts = [[source.randrange(3, 288) for _ in range(6)] for _ in range(6)]
    settings = Settings(max_new_tokens=24, stop_ids=())
    exact = Target.load(str(tiny_target_dir), "float32", "cpu")
    plain, drafted = (decode(exact, drafter, prompts, settings) for drafter in (NoDrafter(), LookupDrafter(4, 1)))
    assert identity.divergences(exact, prompts, drafted, plain) == []
    rough = Target.load(str(tiny_target_dir), "bfloat16", "cpu")
    low = decode(rough, NoDrafter(), prompts, settings)
    found = identity.divergences(rough, prompts, low, plain)
    assert found, "bf16 parts from fp32 somewhere, or this test shows nothing"
    for each in found:
        text, other = low.outputs[each["prompt"]].ids, plain.outputs[each["prompt"]].ids
        assert text[: each["position"]] == other[: each["position"]]
        assert text[each["position"]] != other[each["position"]]
        ids = torch.tensor([[*prompts[each["prompt"]], *text[: each["position"]]]])
        logits_V = rough.model(ids).logits[0, -1].float().sort(descending=True).values
        assert each["margin"] == pytest.approx(float(logits_V[0] - logits_V[1]), abs=1e-6)


# --- the script ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `certify.py` with arguments; returns exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["certify.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run_script(certify.main)
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


def check_shape(certificate: dict[str, Any]) -> None:
    assert set(certificate) == {"schema", "head", "target", "failed", *KEYS}
    assert certificate["schema"] == 1
    for part, keys in KEYS.items():
        for entry in certificate[part]:
            assert set(entry) == keys
    for run in certificate["greedy"]:
        for divergence in run["divergences"]:
            assert set(divergence) == {"prompt", "position", "margin"}


def test_without_a_head_rules_and_mutants(
    script: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "RULE_CASES", 10)
    monkeypatch.setattr(certify, "CASES", 40)
    code, out, _ = script("--out", tmp_path / "certificate")
    assert code == 0, out
    certificate = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    check_shape(certificate)
    assert certificate["chi_square"] == certificate["greedy"] == []
    assert max(rule["max_deviation"] for rule in certificate["rules"] if rule["lossless"]) < 1e-12
    assert {rule["name"] for rule in certificate["rules"] if not rule["lossless"]} == {
        "typical_lossy, deterministic tree"
    }
    assert len(certificate["mutants"]) == 22
    assert all(mutant["killed"] for mutant in certificate["mutants"])
    assert certificate["head"] is certificate["target"] is None
    assert certificate["failed"] == []


def test_with_a_head_the_loop_and_greedy_identity(
    script: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    tiny_target_dir: Path,
    tiny_conversations: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certify, "prove_rules", lambda seed: [])
    monkeypatch.setattr(certify, "kill_mutants", lambda seed: [])
    planted = {"name": "planted", "killed": True, "max_deviation": certify.FAULT}
    monkeypatch.setattr(certify, "plant_fault", lambda seed: planted)
    head = save_tiny_head(tmp_path / "head", tiny_target_dir)
    arguments = (
        "--head",
        head,
        "--target",
        tiny_target_dir,
        "--prompts",
        tiny_conversations,
        "--out",
        tmp_path / "out",
    )
    sizes = ("--count", 3, "--max_new_tokens", 8, "--draws", 300, "--dtype", "bfloat16")
    code, out, _ = script(*arguments, *sizes)
    assert code == 0, out
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    check_shape(certificate)
    assert {test["drafter"] for test in certificate["chi_square"]} >= {"medusa", "sampled chain", "lookup"}
    for name in SETTINGS:
        assert any(test["settings"] == name and test["drafter"] == "medusa" for test in certificate["chi_square"])
    assert [(run["dtype"], run["prompts"]) for run in certificate["greedy"]] == [("float32", 3), ("bfloat16", 3)]
    assert certificate["greedy"][0]["identical"]
    assert certificate["head"] == {"weights_sha256": sha256((head / "model.safetensors").read_bytes()).hexdigest()}
    assert certificate["target"] == {"name": str(tiny_target_dir), "fingerprint": fingerprint(tiny_target_dir)}
    assert certificate["failed"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--head", "nowhere"], "nowhere: no such folder"),
        (["--prompts", "nowhere.jsonl"], "give --head too"),
        (["--draws", "0"], "--draws 0"),
        (["--device", "cpu", "--unknown", "1"], "see --help"),
        (["--dtype", "int8"], "see --help"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    script: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: list[str], says: str
) -> None:
    code, _, error = script("--out", tmp_path / "out", *arguments)
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not (tmp_path / "out").exists()


def test_a_head_for_another_target_is_refused(
    script: Callable[..., tuple[int, str, str]], tmp_path: Path, tiny_target_dir: Path, eight: Target
) -> None:
    head = save_tiny_head(tmp_path / "head", tiny_target_dir)
    code, _, error = script("--head", head, "--target", eight.path, "--out", tmp_path / "out")
    assert code == 2
    assert "trained for target" in error


def test_what_fails_is_said() -> None:
    certificate = certify.Certificate(
        schema=1,
        head=None,
        target=None,
        rules=[{"name": "r", "lossless": True, "max_deviation": 1e-3}],
        mutants=[{"name": "m", "killed": False, "max_deviation": 0.0}],
        chi_square=[{"drafter": "d", "settings": "s", "p_value": 1e-9, "draws": 1}],
        greedy=[
            {"dtype": "float32", "prompts": 2, "identical": False, "divergences": [{}]},
            {"dtype": "bfloat16", "prompts": 2, "identical": False, "divergences": [{}]},
        ],
        failed=[],
    )
    assert len(certify.failures(certificate)) == 4


def test_certify_refuses_before_it_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match="is a file"):
        certify.check(certify.Options(out=tmp_path / "file"))
