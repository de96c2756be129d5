"""The lean pass against transformers' own forward: states, taps, and what becomes of the target's modules.

That decoding with it is right (windows, trees, batches) is shown in test_architectures.py, whose Llama, Mistral, Qwen2
and Qwen3 go through it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from eval.decode import Settings, decode
from eval.drafters.lookup import LookupDrafter
from eval.drafters.none import NoDrafter
from eval.lean import compile_target, lean_decoder
from eval.passes import TargetPasses
from eval.tree import DraftTree, TreeShape
from heads.errors import HeadwayError
from heads.target import Target
from tests.conftest import save_tiny_target

SIZES: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "eos_token_id": 2,
    "bos_token_id": None, "pad_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
}
PROMPTS = [[5, 9, 4, 7, 7, 30, 21, 8, 11, 200, 3, 90, 17], [44, 13, 8]]
SHAPE = TreeShape.of([(0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0)])


def make_target(name: str, folder: Any, tokenizer: PreTrainedTokenizerFast) -> Target:
    kind, more = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(SIZES | more)))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start out as 0 and 1, which hides mistakes
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


@pytest.mark.parametrize("name", MODELS)
def test_states_and_taps_are_those_of_transformers(
    name: str, tmp_path: Any, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    target = make_target(name, tmp_path, tiny_tokenizer)
    before = {key: value.clone() for key, value in target.model.state_dict().items()}
    found = []
    for lean in (True, False):
        passes = TargetPasses(target, len(PROMPTS), 32, taps=(0, 2), drafts=len(SHAPE.paths))
        assert passes.lean is not None
        if not lean:
            passes.lean = None
        _, states = passes.prefill(PROMPTS)
        drafts_BM = torch.arange(2 * len(SHAPE.paths)).view(2, -1) + 40
        tree = DraftTree.static(torch.tensor([12, 90]), drafts_BM, SHAPE)
        found.append([states, passes.verify(tree)])
    real = torch.arange(13) < torch.tensor([[13], [3]])
    for ours, theirs in zip(*found, strict=True):
        for mine, other in ((ours.last, theirs.last), *((ours.taps[tap], theirs.taps[tap]) for tap in (0, 2))):
            kept = real if mine.shape[1] == 13 else torch.ones(mine.shape[:2], dtype=torch.bool)
            assert (mine - other)[kept].abs().max() <= 2e-5 * other[kept].abs().max()
    after = target.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_joined_weights_take_no_memory_of_their_own(tiny_target_dir: Any) -> None:
    target = Target.load(str(tiny_target_dir), "float32", "cpu")
    lean = lean_decoder(target)
    assert lean is not None
    assert lean is lean_decoder(target)
    attention = target.decoder.layers[0].self_attn
    joined = lean.layers[0].qkv.weight.untyped_storage().data_ptr()
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert part.weight.untyped_storage().data_ptr() == joined


def test_compiled_layers_decode_the_same_text(tmp_path: Any, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """One graph without breaks, in batches whose rows have lengths of their own, past the first bucket of slots."""
    target = make_target("mistral", tmp_path, tiny_tokenizer)
    settings, prompts = Settings(max_new_tokens=40, stop_ids=()), [*PROMPTS, [9]]
    plain = [output.ids for output in decode(target, NoDrafter(), prompts, settings).outputs]
    lean = lean_decoder(target)
    assert lean is not None
    lean.compile(backend="aot_eager")
    assert [output.ids for output in decode(target, NoDrafter(), prompts, settings).outputs] == plain
    assert [output.ids for output in decode(target, LookupDrafter(), prompts, settings).outputs] == plain


class Adapted(nn.Linear):
    """Stands for a quantised or adapted layer, whose weight is not all there is."""


def test_other_builds_go_through_transformers(tmp_path: Any, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = Target.load(str(save_tiny_target(tmp_path, tiny_tokenizer)), "float32", "cpu")
    target.decoder.layers[1].mlp.up_proj.__class__ = Adapted
    assert lean_decoder(target) is None
    assert TargetPasses(target, 1, 8).lean is None
    with pytest.raises(HeadwayError, match="leave out --compile"):
        compile_target(target)
