"""Heads that learnt four short answers of a tiny target by heart, so that what they draft is far from chance, and ways to spoil them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from data_prep.store import StoredConversation
from eval.checkup.texts import given_texts
from eval.doctor import Options, doctor
from eval.replay import replay
from heads.checkpoint import Head
from heads.draft_layer import layer_settings
from heads.eagle import Eagle1Config, Eagle1Head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head
from heads.medusa import MedusaConfig, MedusaHead
from heads.provenance import head_facts
from heads.target import Target, fingerprint_parts
from heads.vocabulary import DraftVocabulary
from tests.conftest import random_answers, save_tiny_target, write_conversations
from tests.eval.eagle_heads import teach

LAYERS, TAPS, STEPS = 8, (2, 4, 5), 3  # the taps are those that engines read of 8 layers
OTHER_TAPS = (1, 3, 4)
THETA = 100.0
TEXTS = 4
PAPERS = "headway.json"
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Clinic:
    """A tiny target, answers of it, and a sound head of each kind, with the manifest that training leaves."""

    target: Target
    conversations: Path
    texts: list[StoredConversation]
    heads: dict[str, Head]

    @property
    def folder(self) -> Path:
        return self.target.path

    def export(self, kind: str, to: str, out: Path, dtype: str = "auto") -> Path:
        """The sound head of `kind` as `heads/convert.py` writes it; "ours" as training does."""
        head = self.heads[kind]
        if to == "ours":
            head.save_pretrained(out)
        else:
            export_head(head, TargetFacts.load(str(self.folder)), to, out, dtype)
        return out


def open_clinic(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Clinic:
    """Twenty random words an answer; a rope base that matters within such short texts."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    saved = save_tiny_target(folder / "target", tokenizer, num_hidden_layers=LAYERS, rope_parameters=rope)
    conversations = write_conversations(folder / "answers.jsonl", random_answers(TEXTS, words=20))
    target = Target.load(str(saved), "float32", "cpu")
    texts = given_texts(target, conversations, TEXTS, 64).texts
    return Clinic(target, conversations, texts, {})


def train(clinic: Clinic, kind: str) -> Head:
    """Learn the answers by heart; the manifest promises what replaying them gives."""
    target, shape = clinic.target, layer_settings(clinic.target.config)
    output_VH, vocab = target.ends.lm_head_weight, target.vocab_size
    ids_D = torch.cat([text.ids_T for text in clinic.texts] + [torch.tensor([0, 1, 2])]).unique()
    head: Head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind.startswith("eagle3"):
            taps = OTHER_TAPS if kind == "eagle3-taps" else TAPS
            config = Eagle3Config(**shape, taps=taps, draft_vocab_size=len(ids_D), norm_output=True, fc_norm=True)
            head = Eagle3Head.from_target(config, output_VH, DraftVocabulary(ids_D, vocab))
        elif kind == "eagle":
            head = Eagle1Head(Eagle1Config(**shape))
        else:
            shared = kind == "medusa-shared"
            medusa = MedusaConfig(
                hidden_size=target.hidden_size,
                vocab_size=vocab,
                num_heads=STEPS,
                draft_vocab_size=len(ids_D) if shared else None,
                output="shared" if shared else "own",
            )
            chosen = ids_D if shared else torch.arange(vocab)
            head = MedusaHead.from_target(medusa, output_VH, DraftVocabulary(chosen, vocab))
            head.lm_head.weight.requires_grad_(True)
        teach(head, target, clinic.texts, STEPS, times=80 if isinstance(head, MedusaHead) else 24)
    head.eval()
    head.manifest = {
        "kind": "head",
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "parts": fingerprint_parts(target.path),
        },
        "head": json.loads(json.dumps(head_facts(head))),
        "best": replay(head, target.ends, clinic.texts, STEPS).figures(),
    }
    return head


@dataclass(frozen=True)
class Diagnosis:
    """What `eval/doctor.py --json` said."""

    exit_code: int
    report: dict[str, Any]

    @property
    def codes(self) -> list[str]:
        return sorted(finding["code"] for finding in self.report["findings"])

    @property
    def errors(self) -> list[str]:
        return sorted(finding["code"] for finding in self.report["findings"] if finding["severity"] == "error")

    def finding(self, code: str) -> dict[str, str]:
        """The one finding of a code."""
        (found,) = [finding for finding in self.report["findings"] if finding["code"] == code]
        return found


Examine = Callable[..., Diagnosis]


def examine(capsys: Any, clinic: Clinic, head: Path, **options: Any) -> Diagnosis:
    """Run the doctor on a folder, with the clinic's answers as texts."""
    texts = {} if "store" in options else {"conversations": clinic.conversations}
    capsys.readouterr()
    code = doctor(Options(head, **{"dtype": "float32", "device": "cpu", **texts, **options}, json=True))
    return Diagnosis(code, json.loads(capsys.readouterr().out))


# --- spoiling ---------------------------------------------------------------------------------------------------------


def write_config(folder: Path, **changes: Any) -> None:
    """Keys of config.json anew; `...` takes one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def write_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any], name: str = "model.safetensors") -> None:
    """The tensors of a folder after `change` has been at them."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})


def without_papers(folder: Path) -> Path:
    """As if someone else had made the head."""
    (folder / PAPERS).unlink()
    return folder


def other_target(clinic: Clinic, folder: Path) -> Path:
    """A copy of the target to change."""
    return shutil.copytree(clinic.folder, folder)
