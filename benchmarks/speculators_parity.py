"""The speculators library loads our speculators exports: its logits against ours over three draft steps, and what it saves, read back.

    python benchmarks/speculators_parity.py        # writes benchmarks/results/engines-speculators.json, about a minute

Random heads on a random Llama of 8 layers, fp32, one for each switch of the layout. The library runs in an
environment of its own (speculators_environment.py).

Shapes: S steps, T tokens, P rows, D draft vocabulary, H hidden, F taps side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from results_file import write_result
from safetensors.torch import load_file, save_file
from speculators_environment import PACKAGE, build_environment
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.embedded import embedded_folder
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head, read_head
from heads.unroll import schedule
from heads.vocabulary import DraftVocabulary

SIDE = Path(__file__).with_name("speculators_side.py")
STEPS, TOKENS, H, LAYERS, D = 3, 40, 64, 8, 1000
TOLERANCE = 1e-4
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full vocabulary": {"draft_vocab_size": None},
    "other taps": {"taps": (1, 3, 6)},
    "fc_norm and norm_output": {"fc_norm": True, "norm_output": True},
    "norm_before_residual and norm_before_fc": {"norm_before_residual": True, "norm_before_fc": True},
    "two layers": {"num_layers": 2},
    "scaled rope": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
}


def make_target(folder: Path) -> str:
    """A random Llama with the embedded target's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=H,
        intermediate_size=2 * H,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_head(target: TargetFacts, more: dict[str, Any]) -> Eagle3Head:
    settings: dict[str, Any] = {
        "hidden_size": H,
        "vocab_size": target.vocab_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "draft_vocab_size": D,
        "taps": (2, 4, 5),
    }
    config = Eagle3Config(**settings | more)
    head = Eagle3Head(config)
    ids_D = torch.randperm(config.vocab_size)[: config.output_size].sort().values
    head.set_vocabulary(DraftVocabulary(ids_D, config.vocab_size))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(
                torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            )
            if "norm" in name:
                parameter.add_(1)
    head.manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    return head.eval()


@torch.no_grad()
def our_logits(head: Eagle3Head, states_TF: Tensor, embeds_TH: Tensor) -> Tensor:
    """[S, P, D] by the trainer's own unrolling, of the rows that have a token at every step."""
    rows = TOKENS - STEPS
    plan = schedule([TOKENS], torch.arange(rows), torch.zeros(rows, STEPS, dtype=torch.int64))
    hidden_S = head.unroll(head.features_of(states_TF), embeds_TH, plan)
    return torch.stack([head.logits(hidden_PH) for hidden_PH in hidden_S])


class Case:
    """One head, exported with random inputs into a folder of its own."""

    def __init__(self, target: TargetFacts, more: dict[str, Any], folder: Path) -> None:
        self.target, self.folder, self.head = target, folder, make_head(target, more)
        folder.mkdir()
        export_head(self.head, target, "speculators", folder / "export")
        self.states_TF, self.ids_T = torch.randn(TOKENS, 3 * H), torch.randint(target.vocab_size, (TOKENS,))
        inputs = {"states_TF": self.states_TF[:-1].contiguous(), "ids_T": self.ids_T[1:].contiguous()}
        save_file(inputs, folder / "inputs.safetensors")

    def compare(self) -> dict[str, Any]:
        """The largest difference of the logits at each step, and whether what the library saved is our head again."""
        theirs_SPD = load_file(self.folder / "logits.safetensors")["logits_STD"][:, : TOKENS - STEPS]
        ours_SPD = our_logits(self.head, self.states_TF, self.target.embedding_VH[self.ids_T])
        back = read_head(self.folder / "saved", self.target.name).head
        ours, saved = self.head.state_dict(), back.state_dict()
        same = all(torch.equal(ours[name], saved[name]) for name in ours | saved)
        return {
            "largest_difference": [float(step) for step in (ours_SPD - theirs_SPD).abs().amax((1, 2))],
            "largest_logit": float(ours_SPD.abs().max()),
            "same_argmax": bool((ours_SPD.argmax(-1) == theirs_SPD.argmax(-1)).all()),
            "saved_by_it_and_read_back": same and back.config == self.head.config,
        }


def main() -> None:
    torch.manual_seed(0)
    python = build_environment()
    with tempfile.TemporaryDirectory() as scratch:
        target = TargetFacts.load(make_target(Path(scratch) / "target"))
        cases = {
            name: Case(target, more, Path(scratch) / str(number))
            for number, (name, more) in enumerate(VARIANTS.items())
        }
        command = [str(python), str(SIDE), *(str(case.folder) for case in cases.values())]
        subprocess.run(command, check=True, env=os.environ | {"TORCHDYNAMO_DISABLE": "1"})
        figures = {name: case.compare() for name, case in cases.items()}
    for name, found in figures.items():
        print(name, found)
    passed = all(
        max(found["largest_difference"]) <= TOLERANCE and found["saved_by_it_and_read_back"]
        for found in figures.values()
    )
    write_result(
        "engines-speculators", {"package": PACKAGE, "tolerance": TOLERANCE, "passed": passed, "heads": figures}
    )
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
