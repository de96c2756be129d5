"""Runs inside the environment that speculators_parity.py builds: loads exports, computes logits, saves the heads again.

    python speculators_side.py FOLDER...

Each FOLDER holds `export/` and inputs.safetensors with `states_TF` and `ids_T`, row t being state t beside token t + 1. It gets
logits.safetensors with `logits_STD`, and `saved/`, what the library's own save_pretrained writes. Shapes: S steps, T rows, F taps side by side, D draft vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

STEPS = 3


@torch.no_grad()
def follow(folder: Path) -> None:
    config = SpeculatorModelConfig.from_pretrained(folder / "export")
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention wants a GPU
    model = SpeculatorModel.from_pretrained(folder / "export", config=config).eval()
    given = load_file(folder / "inputs.safetensors")
    logits = []
    model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0].clone()))
    model(
        hidden_states=given["states_TF"][None],
        input_ids=given["ids_T"][None],
        document_ids=torch.zeros(1, len(given["ids_T"]), dtype=torch.int64),
        ttt_steps=STEPS,
    )
    save_file({"logits_STD": torch.stack(logits)}, folder / "logits.safetensors")
    model.save_pretrained(folder / "saved")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        follow(Path(name))
