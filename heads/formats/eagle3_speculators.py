"""The speculators layout of EAGLE-3, which vLLM and the speculators library read: several draft layers, every switch."""

from __future__ import annotations

from typing import Any

from heads.eagle3 import Eagle3Head
from heads.errors import HeadwayError
from heads.formats.eagle3_raw import IDS, norm_switches, read_head, rename_legacy, shapes, tap_ids
from heads.formats.files import Foreign, check_tensors, dtype_name
from heads.formats.layout import EMBEDDING, Exported, Layout, TargetFacts
from heads.formats.llama import llama_fields
from heads.formats.recognise import SPECULATORS

TITLE = "speculators layout"
VERSION = "0.9.0"
"""The version of speculators whose layout this is."""
VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")


def write(head: Eagle3Head, target: TargetFacts, engine: str, draft_tokens: int) -> Exported:
    """The taps are always named, "entering" as here; a missing norm_before_residual would mean true."""
    config, notes = head.config, list[str]()
    layer = llama_fields(config, target, notes)
    dtype = dtype_name(head.fc.weight.dtype)
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config.output_size,
        "target_hidden_size": config.hidden_size,
        **norm_switches(config),
        "embed_requires_grad": False,
        IDS: list(config.taps),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {**layer, "torch_dtype": dtype},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target.served_name, "architectures": list(target.architectures)},
        },
    }
    # vLLM's module counts the taps of this layout from a field that the layout lacks, and takes 3 for granted.
    if len(config.taps) != 3:
        notes.append(f"{len(config.taps)} taps: vLLM sizes fc of a speculators head for 3 and will refuse the file")
    prefixes = [f"layers.{number}." for number in range(config.num_layers)]
    # As the library saves it: where the file lacks it, what a fresh module drew may stay there without a word.
    tensors = head.state_dict() | {EMBEDDING: target.embedding_VH.to(head.fc.weight.dtype)}
    expected = shapes(layer | fields, prefixes, len(config.taps)) | {EMBEDDING: (config.vocab_size, config.hidden_size)}
    check_tensors(tensors, expected, "export")
    return Exported(fields, tensors, notes=tuple(notes))


def read(foreign: Foreign, target: TargetFacts, taps: tuple[int, ...] | None) -> Eagle3Head:
    """The head in a folder. Raises HeadwayError for what it has more or less than `Eagle3Head`."""
    rename_legacy(foreign)
    foreign.drop(lambda name: name in VERIFIER, "the target's own")
    config = foreign.config
    layer: Any = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise HeadwayError(
            f"{foreign.folder / 'config.json'}: `transformer_layer_config` is missing; the config is not whole"
        )
    if any("q_norm" in name or "k_norm" in name for name in foreign.tensors):
        raise HeadwayError(f"{foreign.weights}: its layer norms queries and keys (qwen3); draft layers here do not")
    if "norm_before_residual" not in config:
        foreign.note("norm_before_residual is missing, which means true")
    switches = {"norm_before_residual": True} | config
    return read_head(foreign, layer, switches, tap_ids(foreign, target, taps), target)


LAYOUT = Layout(SPECULATORS, TITLE, read, write)
