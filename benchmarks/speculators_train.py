"""Runs inside the environment of speculators_environment.py: the library's own model and training epoch on what benchmarks/train_speed.py gives.

    python speculators_train.py FOLDER     # FOLDER as train_speed.py's `hand_over` writes it

Reads a line of JSON {"pack": tokens of a pack} from its input for each run, trains once over all packs, and writes a line
{"tokens", "steps", "seconds", "added_mib", "peak_mib"} or {"error"}. Its collator, packing, loss, optimizer and step are
untouched; only the devices it asks for are the CPU, for which its trainer has no name.

Shapes: X tokens of all conversations, H hidden, F taps side by side, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import speculators.train.trainer as trainer_module
import torch
from peak import measured
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from transformers import AutoConfig

LEFT_MIB = 1024  # of the machine's free memory, for everything else
NEVER = 10**9


class Packs(list[dict[str, Any]]):
    """Batches as its loader would give them, ready in memory."""

    batch_sampler = None


class Bench:
    """Its model, optimizer and trainer, and the conversations."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "settings.json").read_text())
        self.dtype = getattr(torch, self.settings["dtype"])
        self.samples = conversations(load_file(folder / "conversations.safetensors"))
        self.model = draft_model(self.settings, load_file(folder / "vocabulary.safetensors"))
        self.packs: dict[int, tuple[Packs, int]] = {}
        trainer_module.get_local_rank = lambda: "cpu"
        config = trainer_module.TrainerConfig(
            lr=self.settings["lr"],
            num_epochs=1,
            save_path=tempfile.mkdtemp(dir=folder),
            train_call_kwargs={
                "ttt_steps": self.settings["steps"],
                "ttt_step_loss_decay": self.settings["decay"],
                "loss_config": resolve_loss_config("kl_div", "eager"),  # the fused kernels are for GPUs
            },
            scheduler_type="none",
            hidden_states_dtype=self.dtype,
            log_freq=NEVER,
        )
        self.trainer = trainer_module.Trainer(self.model, config, Packs())
        self.trainer.device_type = "cpu"
        self.trainer.rank = 1  # no progress bar
        self.trainer.global_step = 1  # nor a log line, which would ask for a GPU

    def pack(self, size: int) -> tuple[Packs, int]:
        """Its own packing of the conversations into `size` tokens, and the tokens in them."""
        if size not in self.packs:
            sampler = MultipackDistributedBatchSamplerV2(size, [len(row["input_ids"]) for row in self.samples], 1, 0)
            collate = CollateFn(size, self.model.hidden_size, len(self.settings["taps"]), self.dtype, shift_batch)
            numbers = [list(batch) for batch in sampler]
            packs = Packs(collate([self.samples[number] for number in batch]) for batch in numbers)
            tokens = sum(len(self.samples[number]["input_ids"]) for batch in numbers for number in batch)
            self.packs[size] = packs, tokens
        return self.packs[size]

    def run(self, size: int) -> dict[str, Any]:
        """One epoch over the packs."""
        packs, tokens = self.pack(size)
        self.trainer.train_loader = packs
        try:
            taken = measured(lambda: self.trainer.train_epoch(0), "cpu")
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            self.model.zero_grad()
            return {"error": f"out of memory: {str(error).splitlines()[0]}"}
        return {"tokens": tokens, "steps": len(packs), **taken._asdict()}


def conversations(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What its dataset gives for each conversation."""
    lengths = tensors.pop("lengths").tolist()
    parts = {name: tensor.split(lengths) for name, tensor in tensors.items()}
    return [
        {name: parts[name][number] for name in parts}
        | {"lengths": torch.tensor([length]), "position_ids": torch.arange(length)}
        for number, length in enumerate(lengths)
    ]


def draft_model(settings: dict[str, Any], vocabulary: dict[str, torch.Tensor]) -> Eagle3DraftModel:
    """A new EAGLE-3 model of one layer in the target's shape, as its command line makes one."""
    layer = AutoConfig.from_pretrained(settings["target"])
    layer.num_hidden_layers = 1
    model = Eagle3DraftModel.from_training_args(
        layer,
        **vocabulary,
        draft_vocab_size=len(vocabulary["d2t"]),
        norm_before_residual=False,
        fc_norm=settings["fc_norm"],
        norm_output=settings["norm_output"],
        target_layer_ids=settings["taps"],
        ttt_steps=settings["steps"],
        verifier_name_or_path=settings["target"],
        draft_attn_impl="eager",  # flex attention wants a GPU
    )
    model.lm_head.weight.requires_grad_(settings["train_output"])
    return model


def main() -> None:
    logging.disable(logging.WARNING)
    free_kib = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line
    )
    limit = (free_kib - LEFT_MIB * 1024) * 1024
    resource.setrlimit(
        resource.RLIMIT_DATA, (limit, limit)
    )  # an allocation that fails, instead of a process that is killed
    bench = Bench(Path(sys.argv[1]))
    answers, sys.stdout = sys.stdout, sys.stderr  # its progress goes beside the answers
    for line in sys.stdin:
        print(json.dumps(bench.run(json.loads(line)["pack"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
