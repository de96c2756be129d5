"""Two gloo processes against one: plain data parallelism, and every stage of DeepSpeed's ZeRO as on two machines.

The 20 steps are plain gradient steps of small batches, in two passes a process; a third of the conversations is masked, so that
at times one process alone has something to learn (cases 2, 5 and 13).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.train.conftest import metrics, weights
from tests.train.launching import CONFIGS, DDP, LAUNCH, ROOT, free_port, launch, launch_all
from tests.train.worker import BEFORE, GRADIENT, run_job
from tests.train.workplace import SGD, SMALL, TRAINERS, Workplace
from train.sampler import shares

SPLIT = (*SMALL, "--optim.accumulation=2")
CLIP = (*SGD[:3], "--optim.clip=0.05", "--optim.lr=1.0", "--optim.max_steps=1", "--save.confirm=0")
STAGES = ("zero1", "zero2", "zero2_offload", "zero3_offload")
WORKER = str(ROOT / "tests" / "train" / "worker.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, features: Path, tapped: Path, tiny_target_dir: Path) -> Workplace:
    """With what one process makes of it."""
    torch.set_num_threads(1)
    place = Workplace(tmp_path_factory.mktemp("processes"), features, tapped, tiny_target_dir)
    for trainer in TRAINERS:
        run_job(**place.steps(trainer, f"{trainer}-one", *SMALL, record=place.record(f"{trainer}-one")))
    run_job(**place.job("medusa", "clip-one", *CLIP, record=place.record("clip-one")))
    run_job(**place.job("medusa", "other-launch", die_after=4))
    return place


@pytest.fixture(scope="module")
def ddp(place: Workplace) -> str:
    """The output of a launch of two processes with plain data parallelism."""
    jobs = [
        place.steps(trainer, f"{trainer}-ddp", *SPLIT, record=place.record(f"{trainer}-ddp")) for trainer in TRAINERS
    ]
    jobs.append(place.job("medusa", "clip-ddp", *CLIP, record=place.record("clip-ddp")))
    jobs.append(
        place.job("medusa", "other-launch", refused="was saved with processes 1, this run has 2; .* resume with")
    )
    port = ["--main_process_port", free_port()]
    code, output = launch([*LAUNCH, *DDP, *port, WORKER, place.write("ddp", jobs)], timeout=1200)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def zero(place: Workplace) -> str:
    """The output of two launches of one process each, as of two machines, with the shipped configurations of DeepSpeed.

    Weights under 100,000 elements would stay whole under ZeRO-3: here none does.
    """
    jobs = []
    for trainer in TRAINERS:
        name = f"{trainer}-zero3"
        jobs.append(place.steps(trainer, name, *SPLIT, deepspeed=sharded(place, "zero3"), record=place.record(name)))
    for stage in STAGES:
        jobs.append(place.steps("medusa", f"medusa-{stage}", *SPLIT, deepspeed=sharded(place, stage)))
    zero3 = {"deepspeed": sharded(place, "zero3")}
    jobs.append(place.job("medusa", "clip-zero3", *CLIP, record=place.record("clip-zero3"), **zero3))
    jobs.append(place.job("medusa", "whole", **zero3))
    jobs.append(place.job("medusa", "resumed", **zero3, die_after=4))
    refused = "was saved with kind DEEPSPEED ZeRO-3, this run has DEEPSPEED ZeRO-1"
    jobs.append(place.job("medusa", "resumed", deepspeed=sharded(place, "zero1"), refused=refused))
    jobs.append(place.job("medusa", "resumed", **zero3))
    port, arguments = free_port(), [WORKER, place.write("zero", jobs)]
    machines = [
        "--num_machines",
        "2",
        "--num_processes",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        port,
    ]
    config = ["--config_file", str(CONFIGS / "zero3.yaml")]
    made = launch_all(
        [[*LAUNCH, *config, *machines, "--machine_rank", rank, *arguments] for rank in ("0", "1")], timeout=1800
    )
    assert [code for code, _ in made] == [0, 0], "\n".join(output for _, output in made)
    return made[0][1]


def sharded(place: Workplace, stage: str) -> str:
    """A shipped configuration of DeepSpeed that leaves no weight whole."""
    config = json.loads((ROOT / "configs" / "deepspeed" / f"{stage}.json").read_text())
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = place.folder / f"{stage}.ds.json"
    path.write_text(json.dumps(config))
    return str(path)


Property = Callable[[str, object], None]


def compare(place: Workplace, trainer: str, launched: str, record: Property) -> None:
    """Gradient of the first step where it was recorded, weights after all 20, and every logged figure."""
    one, two = f"{trainer}-one", f"{trainer}-{launched}"
    shown = {"weights after 20 steps": place.weight_error(one, two)}
    if Path(place.record(two)).exists():
        shown["gradient"] = place.gradient_error(one, two)
    for name, error in shown.items():
        record(name, error)
        print(f"{trainer}, 2 processes ({launched}) against 1: {name} {error:.1e} apart (relative L2)")
        assert error <= 1e-6, name
    same_figures(place.folder / one, place.folder / two)


def same_figures(one: Path, two: Path) -> None:
    for a, b in zip(metrics(one, "train"), metrics(two, "train"), strict=True):
        for key in ("rows", "rows_in_draft_vocabulary", "conversations", "tokens"):
            assert a[key] == b[key], key
        for key in ("losses", "accuracy", "conditional", "tau", "loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-9), key
    for a, b in zip(metrics(one, "validation"), metrics(two, "validation"), strict=True):
        for key in ("tau", "training_loss", "replayed_tau", "replayed_tau_error", "losses", "accuracy", "conditional"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
        assert (a["replayed_rounds"], a["replayed_tokens"]) == (b["replayed_rounds"], b["replayed_tokens"])
        overlaps = [[share or 0.0 for share in row["overlap"]] for row in (a, b)]
        assert overlaps[0] == pytest.approx(overlaps[1], rel=1e-4)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_data_parallelism_equals_one_process(place: Workplace, ddp: str, trainer: str, record_property: Property):
    assert "2 process(es) on cpu, MULTI_CPU, precision no" in ddp
    compare(place, trainer, "ddp", record_property)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_zero3_equals_one_process(place: Workplace, zero: str, trainer: str, record_property: Property):
    assert "2 process(es) on cpu, DEEPSPEED ZeRO-3, precision no" in zero
    compare(place, trainer, "zero3", record_property)


@pytest.mark.parametrize("stage", STAGES)
def test_every_other_stage_equals_one_process(place: Workplace, zero: str, stage: str, record_property: Property):
    kind = f"ZeRO-{stage[4]}" + (", offloaded" if stage.endswith("offload") else "")
    assert f"2 process(es) on cpu, DEEPSPEED {kind}, precision no" in zero
    compare(place, "medusa", stage, record_property)


@pytest.mark.parametrize("launched", ["one", "ddp", "zero3"])
def test_the_gradient_is_clipped_by_its_global_norm(place: Workplace, request: pytest.FixtureRequest, launched: str):
    """One plain step at rate 1: the weights move by the clip's 0.05 against the whole gradient, whose norm is logged."""
    if launched != "one":
        request.getfixturevalue({"ddp": "ddp", "zero3": "zero"}[launched])
    name = f"clip-{launched}"
    gradient = place.recorded("clip-one", GRADIENT)
    assert metrics(place.folder / name, "train")[0]["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-6)
    assert gradient.norm() > 0.1
    tensors, start = load_file(place.folder / name / "model.safetensors"), load_file(place.record("clip-one"))
    names = sorted(key.removeprefix(BEFORE) for key in start if key.startswith(BEFORE))
    moved = torch.cat([(tensors[key].double() - start[BEFORE + key].double()).flatten() for key in names])
    assert float(moved.norm()) == pytest.approx(0.05, rel=1e-4)
    assert float((moved + 0.05 * gradient / gradient.norm()).norm()) <= 1e-4 * 0.05


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_process_without_a_supervised_row_takes_part_and_is_counted(place: Workplace, ddp: str, trainer: str):
    """Case 5: what was counted are the passes, of both processes, all of whose conversations are masked."""
    store, masked = place.stores[trainer], set(place.masked[trainer])
    expected, alone = 0, set()
    for window in place.windows(trainer):
        parts = shares(window.rows, store.lengths, 4)
        bare = [all(store.conversation_ids[row] in masked for row in part) for part in parts]
        expected += sum(bare[number] and bool(part) for number, part in enumerate(parts))
        idle = [rank for rank in (0, 1) if all(bare[rank::2])]
        alone |= set(idle) if len(idle) == 1 else set()
    assert alone == {0, 1}  # in some step the first process has nothing to learn, in some the second
    assert metrics(place.folder / f"{trainer}-ddp", "train")[-1]["masked_batches"] == expected > 0


def test_resumed_under_zero3_it_ends_with_the_same_bits(place: Workplace, zero: str):
    """Case 13: both processes died after step 4; a checkpoint of 3 was there."""
    assert "going on from step 3: " in zero
    assert weights(place.folder / "resumed") == weights(place.folder / "whole")


def test_shipped_launch_configurations_are_what_they_are_called():
    stages = {"zero1": 1, "zero2": 2, "zero2_offload": 2, "zero3": 3, "zero3_offload": 3}
    for name, stage in stages.items():
        launch_config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        assert launch_config["distributed_type"] == "DEEPSPEED"
        path = launch_config["deepspeed_config"]["deepspeed_config_file"]
        assert path == f"configs/deepspeed/{name}.json"
        zero = json.loads((ROOT / path).read_text())["zero_optimization"]
        assert zero["stage"] == stage
        assert ("offload_optimizer" in zero) == name.endswith("offload")
        assert ("offload_param" in zero) == (name == "zero3_offload")
        # Or no best head could be saved.
        assert zero.get("stage3_gather_16bit_weights_on_model_save", False) == (stage == 3)
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*stages, "ddp", "cpu2"}
