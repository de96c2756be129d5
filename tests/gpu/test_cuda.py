"""The same code on CUDA as on the CPU: states, texts, figures. In float64, where rounding decides nothing."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eval import measure
from eval.clock import Clock
from eval.decode import Settings, decode
from eval.drafters import Drafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.medusa import MedusaDrafter
from eval.drafters.none import NoDrafter
from eval.identity import generate
from eval.sampling import Sampling
from heads import load_head
from heads.target import Target
from tests.eval.test_measure import save_tiny_head

DEVICE = "cuda"
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], [20, 21, 22, 23, 20]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def here(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), "float64", "cpu")


@pytest.fixture(scope="module")
def there(tiny_target_dir: Path) -> Target:
    return Target.load(str(tiny_target_dir), "float64", DEVICE)


@pytest.fixture(scope="module")
def tiny_head(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    return save_tiny_head(tmp_path_factory.mktemp("heads") / "medusa", tiny_target_dir)


def test_states_taps_and_logits(here: Target, there: Target) -> None:
    ids_BT = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    ours, theirs = (target.states(ids_BT.to(target.device), taps=(1, 3)) for target in (here, there))
    torch.testing.assert_close(theirs.last.cpu(), ours.last)
    for tap in (1, 3):
        torch.testing.assert_close(theirs.taps[tap].cpu(), ours.taps[tap])
    torch.testing.assert_close(there.logits(theirs.last).cpu(), here.logits(ours.last))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["none", "lookup", "medusa"])
def test_texts_of_a_ragged_batch(here: Target, there: Target, tiny_head: Path, kind: str, sampling: Sampling) -> None:
    """Coins depend on seed and position alone, so even sampled texts are the same on both devices."""

    def drafter(target: Target) -> Drafter:
        if kind == "medusa":
            return MedusaDrafter(load_head(tiny_head, device=target.device, dtype=target.dtype))
        return NoDrafter() if kind == "none" else LookupDrafter(4)

    settings = Settings(max_new_tokens=24, sampling=sampling, seed=3)
    ours, theirs = (decode(target, drafter(target), PROMPTS, settings) for target in (here, there))
    assert [output.ids for output in theirs.outputs] == [output.ids for output in ours.outputs]
    counts = [[(row.prompt, row.drafted, row.accepted, row.emitted) for row in run.rounds] for run in (ours, theirs)]
    assert counts[0] == counts[1]
    theirs.check()


def test_greedy_text_is_that_of_generate(there: Target) -> None:
    for ids in PROMPTS:
        assert decode(there, NoDrafter(), [ids], Settings(max_new_tokens=24)).outputs[0].ids == generate(there, ids, 24)


def test_clock_waits_for_the_device() -> None:
    """Work is queued in far less time than it takes; a reading after it must include it."""
    big = torch.randn(8192, 8192, device=DEVICE)
    clock = Clock(big.device)
    big @ big
    started, queued = clock.now(), time.perf_counter()
    for _ in range(20):
        big @ big
    queued = time.perf_counter() - queued
    assert clock.now() - started > 3 * queued


def test_measurement_runs_on_the_device(
    tiny_target_dir: Path, tiny_head: Path, tiny_conversations: Path, tmp_path: Path
) -> None:
    options = measure.Options(
        target=str(tiny_target_dir),
        prompts=tiny_conversations,
        count=2,
        max_new_tokens=8,
        identity_prompts=2,
        identity_tokens=8,
        dtype="bfloat16",
        device=DEVICE,
        out=tmp_path / "report",
    )
    measure.measure(options, [str(tiny_head), "lookup"], Console(file=StringIO()))
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["target"]["device"].startswith(DEVICE)
    assert all(run["lossless"]["greedy_identical"] for run in report["runs"])
