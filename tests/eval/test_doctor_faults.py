"""Planted faults, each in the layouts where people meet it: the doctor names that one and no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import save_tiny_target
from tests.eval.clinic import IDS, LAYERS, TAPS, THETA, Clinic, Examine, write_config, write_tensors

Tensors = dict[str, Tensor]


def taps_a_layer_late(folder: Path) -> None:
    """The convention mixed up: vLLM's ids where SGLang's belong, which are read as outputs."""
    write_config(folder, eagle_config={"use_aux_hidden_state": True, IDS: list(TAPS)})


def taps_a_layer_early(folder: Path) -> None:
    write_config(folder, **{IDS: [tap - 1 for tap in TAPS]})


def own_taps_late(folder: Path) -> None:
    write_config(folder, taps=[tap + 1 for tap in TAPS])


def absolute(folder: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    write_tensors(folder, change)


def identity(folder: Path) -> None:
    write_tensors(folder, lambda tensors: tensors["d2t"].zero_())


def no_map(folder: Path) -> None:
    write_tensors(folder, lambda tensors: tensors.pop("d2t"))


def without(*names: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        def change(tensors: Tensors) -> None:
            for name in names:
                del tensors[name]

        write_tensors(folder, change, next(folder.glob("*.safetensors")).name)

    return plant


def with_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: write_config(folder, **changes)


def layer_config(**changes: Any) -> Callable[[Path], None]:
    """Of the nested config of speculators."""

    def plant(folder: Path) -> None:
        layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"] | changes
        write_config(folder, transformer_layer_config={k: v for k, v in layer.items() if v is not ...})

    return plant


def swapped(folder: Path) -> None:
    """Of the original layout: the first two heads in each other's place."""

    def change(tensors: Tensors) -> None:
        for part in ("0.linear.weight", "0.linear.bias", "1.weight"):
            tensors[f"0.{part}"], tensors[f"1.{part}"] = tensors[f"1.{part}"], tensors[f"0.{part}"]

    write_tensors(folder, change, "medusa_lm_head.safetensors")


def rotated(folder: Path) -> None:
    """Of the engine layout: head k in the place of head k + 1."""

    def change(tensors: Tensors) -> None:
        old = dict(tensors)
        for k in range(3):
            for part in ("blocks.{}.layers.0.weight", "blocks.{}.layers.0.bias", "lm_heads.{}.weight"):
                tensors[part.format((k + 1) % 3)] = old[part.format(k)]

    write_tensors(folder, change)


def overflowed(folder: Path) -> None:
    """A norm that was scaled up, converted without a check."""

    def change(tensors: Tensors) -> None:
        tensors["norm.weight"][3] = 1e6
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.half()

    write_config(folder, torch_dtype="float16")
    write_tensors(folder, change)


def overflowing(folder: Path) -> None:
    """Every weight fits float16, and the head computes what it did; but on the way through its MLP values do not fit."""

    def change(tensors: Tensors) -> None:
        scale = 6e4 / float(tensors["midlayer.mlp.up_proj.weight"].abs().max())
        tensors["midlayer.mlp.up_proj.weight"] *= scale
        tensors["midlayer.mlp.down_proj.weight"] /= scale
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.half()

    write_config(folder, torch_dtype="float16")
    write_tensors(folder, change)


def truncated(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-700])


def truncated_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-700])


def extra(folder: Path) -> None:
    name = next(folder.glob("*.safetensors")).name
    write_tensors(folder, lambda tensors: tensors.update({"lora_A.weight": torch.ones(2, 2)}), name)


def tied(folder: Path) -> None:
    """A config copied from a tied target's: an engine that heeds it takes the embedding."""
    write_config(folder, tie_word_embeddings=True)


LAYER_0 = "layers.0."
FAULTS = [
    ("eagle3", "vllm", taps_a_layer_late, "taps"),
    ("eagle3", "speculators", taps_a_layer_early, "taps"),
    ("eagle3", "ours", own_taps_late, "taps"),
    ("eagle3", "vllm", absolute, "d2t_absolute"),
    ("eagle3", "speculators", absolute, "d2t_absolute"),
    ("eagle3", "ours", absolute, "d2t_absolute"),
    ("eagle3", "vllm", identity, "map_identity"),
    ("eagle3", "sglang", no_map, "map_identity"),
    ("medusa-shared", "ours", identity, "map_identity"),
    ("eagle3", "vllm", without("midlayer.hidden_norm.weight"), "norm_missing"),
    ("eagle3", "speculators", without(*(f"fc_norm.{tap}.weight" for tap in range(3))), "norm_missing"),
    ("eagle3", "ours", without("norm.weight"), "norm_missing"),
    ("eagle", "vllm", without(f"{LAYER_0}post_attention_layernorm.weight"), "norm_missing"),
    ("eagle3", "speculators", with_config(norm_before_residual=...), "norm_switch"),
    ("eagle3", "vllm", with_config(norm_output=False), "norm_switch"),
    ("eagle3", "vllm", with_config(fc_norm=...), "norm_switch"),
    ("eagle3", "vllm", with_config(max_position_embeddings=128), "max_positions"),
    ("eagle3", "speculators", layer_config(max_position_embeddings=128), "max_positions"),
    ("eagle3", "ours", with_config(max_position_embeddings=128), "max_positions"),
    ("eagle3", "vllm", with_config(rope_theta=10000.0), "rope"),
    ("eagle3", "speculators", layer_config(rope_theta=...), "rope"),
    ("eagle", "sglang", with_config(rope_theta=10000.0), "rope"),
    ("medusa", "medusa", swapped, "heads_swapped"),
    ("medusa", "vllm", rotated, "heads_swapped"),
    ("eagle3", "vllm", overflowed, "overflow"),
    ("eagle3", "vllm", overflowing, "overflow"),
    ("eagle3", "vllm", truncated, "truncated"),
    ("eagle3", "ours", truncated, "truncated"),
    ("medusa", "medusa", truncated, "truncated"),
    ("eagle3", "vllm", truncated_pickle, "truncated"),
    ("eagle3", "vllm", extra, "tensor_extra"),
    ("medusa", "medusa", extra, "tensor_extra"),
    ("medusa", "ours", extra, "tensor_extra"),
    ("eagle3", "vllm", with_config(head_dim=16), "head_dim"),
    ("eagle3", "vllm", with_config(num_attention_heads=2, num_key_value_heads=1, head_dim=16), "head_dim"),
    ("eagle3", "ours", with_config(head_dim=16), "head_dim"),
    ("eagle3", "vllm", without("lm_head.weight"), "lm_head_lost"),
    ("eagle3", "sglang", tied, "lm_head_lost"),
    ("medusa", "medusa", without("0.1.weight", "1.1.weight", "2.1.weight"), "lm_head_lost"),
    ("medusa-shared", "vllm", without("lm_head.weight"), "lm_head_lost"),
    ("medusa", "vllm", without("blocks.1.layers.0.weight"), "tensor_missing"),
]


@pytest.mark.parametrize(("kind", "to", "plant", "code"), FAULTS)
def test_a_planted_fault_is_named(
    clinic: Callable[[str], Clinic],
    diagnose: Examine,
    tmp_path: Path,
    kind: str,
    to: str,
    plant: Callable[[Path], None],
    code: str,
):
    folder = clinic(kind).export(kind, to, tmp_path / "head")
    plant(folder)
    said = diagnose(folder)
    assert (said.codes, said.errors, said.exit_code) == ([code], [code], 1)
    assert said.report["sound"] is False
    finding = said.finding(code)
    assert str(folder) in finding["where"]
    assert len(finding["what"]) > 10 < len(finding["mend"])


def tuned(folder: Path, noise: float) -> None:
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    changed = {name: t + noise * torch.randn(t.shape, generator=generator) for name, t in weights.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})


def other_seed(folder: Path, clinic: Clinic) -> None:
    rope = {"rope_type": "default", "rope_theta": THETA}
    other = save_tiny_target(folder, clinic.target.tokenizer, seed=5, num_hidden_layers=LAYERS, rope_parameters=rope)
    assert other == folder


def other_tokenizer(folder: Path, clinic: Clinic) -> None:
    """The same tokens under other numbers."""
    content = json.loads((folder / "tokenizer.json").read_text())
    names = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    plain = names[3:]
    content["model"]["vocab"] = {name: number for number, name in enumerate([*names[:3], *reversed(plain)])}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def other_template(folder: Path, clinic: Clinic) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("message['role'] +", "message['role'].upper() +"))


def refusing_template(folder: Path, clinic: Clinic) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (other_seed, "other_target"),
        (other_tokenizer, "other_tokenizer"),
        (other_template, "other_template"),
        (refusing_template, "other_template"),
    ],
)
@pytest.mark.parametrize(("kind", "to"), [("eagle3", "vllm"), ("eagle3", "ours"), ("medusa", "medusa")])
def test_another_target_tokenizer_or_template(
    clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path, change: Any, code: str, kind: str, to: str
):
    ward = clinic(kind)
    target = shutil.copytree(ward.folder, tmp_path / "target")
    change(target, ward)
    folder = ward.export(kind, to, tmp_path / "head")
    said = diagnose(folder, target=str(target))
    assert (said.codes, said.errors, said.exit_code) == ([code], [code], 1)


def test_a_target_of_another_size(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    ward = clinic("eagle3")
    other = save_tiny_target(tmp_path / "wide", ward.target.tokenizer, hidden_size=64, num_hidden_layers=LAYERS)
    for folder in (ward.export("eagle3", "vllm", tmp_path / "a"), ward.export("eagle3", "vllm", tmp_path / "b")):
        said = diagnose(folder, target=str(other))
        assert (said.codes, said.exit_code, said.report["probe"]) == (["other_target"], 1, None)
        assert "sizes" in said.report["unprobed"]


def test_case_28_a_target_that_was_tuned_after_the_training(
    clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path
):
    """A warning while the head is worth what was promised; an error when it no longer is."""
    ward = clinic("eagle3")
    folder = ward.export("eagle3", "ours", tmp_path / "head")
    for noise, severity, code in ((1e-4, "warning", 0), (0.2, "error", 1)):
        target = shutil.copytree(ward.folder, tmp_path / f"tuned-{noise}")
        tuned(target, noise)
        said = diagnose(folder, target=str(target))
        assert (said.codes, said.exit_code) == (["other_target"], code)
        finding = said.finding("other_target")
        assert finding["severity"] == severity
        assert "weights" in finding["what"]
        assert "config" not in finding["what"]


def test_a_target_whose_tied_output_is_lost(clinic: Callable[[str], Clinic], diagnose: Examine, tmp_path: Path):
    ward = clinic("eagle")
    target = shutil.copytree(ward.folder, tmp_path / "target")
    write_tensors(target, lambda tensors: tensors.pop("lm_head.weight"))
    said = diagnose(ward.export("eagle", "vllm", tmp_path / "head"), target=str(target))
    assert said.errors == ["lm_head_lost", "other_target"]
    assert str(target) in said.finding("lm_head_lost")["where"]
