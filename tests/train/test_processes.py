"""Runs in processes of their own: killed with SIGKILL, in two gloo processes, and under DeepSpeed ZeRO-2."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heads import load_head
from tests.train.conftest import Run, metrics

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]


def environment() -> dict[str, str]:
    """One thread a process. DeepSpeed's extension is compiled once for this environment: a minute or two, the first time."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
    }


def launch(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit code and output of a launcher; its workers die with it."""
    launcher = subprocess.Popen(
        command,
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # the launcher passes it on; killed outright it would leave its workers behind
        launcher.wait(60)
        raise
    return launcher.returncode, output


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_sigkill_then_the_same_command_gives_the_same_weights(run: Run, recipe_file: Path, tmp_path: Path):
    longer = ("--optim.epochs=40", "--save.every=40")
    expected = run(*longer, out="uninterrupted")
    command = [sys.executable, str(ROOT / "train" / "medusa.py"), f"--config={recipe_file}", *longer]
    with (tmp_path / "log").open("w") as log:
        victim = subprocess.Popen(command, env=environment(), cwd=tmp_path, stdout=log, stderr=log)
        head = tmp_path / "head"
        deadline = time.monotonic() + 400
        while not list(head.glob("checkpoints/step-*")):
            assert victim.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
    assert not (head / "config.json").exists()
    assert (run(*longer) / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert [row["step"] for row in metrics(head, "train")] == [row["step"] for row in metrics(expected, "train")]


CONFIGS = ROOT / "configs" / "accelerate"
DDP = ["--config_file", str(CONFIGS / "cpu2.yaml")]
ZERO2 = ["--config_file", str(CONFIGS / "zero2.yaml"), "--num_processes", "2"]


@pytest.mark.parametrize(("options", "kind"), [(DDP, "MULTI_CPU"), (ZERO2, "DEEPSPEED")], ids=["ddp", "zero2"])
def test_two_processes_equal_one(run: Run, recipe_file: Path, tmp_path: Path, options: list[str], kind: str):
    """The same global batch on two gloo processes, with accumulation: the same figures, and weights to rounding."""
    settings = ("--optim.epochs=2", "--optim.accumulation=2", "--optim.clip=0.5")
    single = run(*settings, out="single")
    command = [*LAUNCH, *options, "--main_process_port", free_port(), str(ROOT / "train" / "medusa.py")]
    arguments = [f"--config={recipe_file}", f"--out={tmp_path / 'double'}", *settings]
    code, output = launch([*command, *arguments], timeout=1200)
    assert code == 0, output
    assert f"2 process(es) on cpu, {kind}" in output
    heads = load_head(single), load_head(tmp_path / "double")
    assert heads[1].manifest["processes"] == 2
    left, right = (head.state_dict() for head in heads)
    for name in left:
        error = (left[name].double() - right[name].double()).norm()
        assert error <= 1e-5 * left[name].double().norm(), name
    for one, two in zip(metrics(single, "train"), metrics(tmp_path / "double", "train"), strict=True):
        assert one["rows"] == two["rows"]
        assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
        assert one["accuracy"] == pytest.approx(two["accuracy"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    for one, two in zip(metrics(single, "validation"), metrics(tmp_path / "double", "validation"), strict=True):
        for key in ("tau", "training_loss", "replayed_tau"):
            assert one[key] == pytest.approx(two[key], rel=1e-5), key
        assert (one["replayed_rounds"], one["replayed_tokens"]) == (two["replayed_rounds"], two["replayed_tokens"])
        overlaps = [[share or 0.0 for share in row["overlap"]] for row in (one, two)]
        assert overlaps[0] == pytest.approx(overlaps[1], rel=1e-4)
