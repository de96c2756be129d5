"""The decode loop on every ordinary architecture: tiny random models in float64, texts longer than their windows.

Greedy ids equal transformers' own `generate` of each prompt alone, and the states of drafted trees equal a plain forward
pass over each path: two references that share neither our cache nor our masks.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from eval.decode import Settings, decode
from eval.drafters import Drafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.none import NoDrafter
from eval.passes import TargetPasses
from eval.probe import TESTED
from eval.tree import DraftTree, TreeShape
from heads.target import Target
from tests.eval.scripted import ScriptedDrafter

NEW, WINDOW, VOCABULARY = 20, 8, 288
LENGTHS = (1, 7, 19, 4, 12)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.3}
EIGHT = GROUPED | {"head_dim": 8}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [7.0] * 4, "rope_theta": 10000.0}

# name -> (config class of transformers, its arguments)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "llama-wide-heads": ("LlamaConfig", GROUPED | {"head_dim": 12}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2-window": ("Qwen2Config", GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", EIGHT),
    "qwen3-moe": ("Qwen3MoeConfig", EIGHT | MOE | {"num_experts": 4}),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", GROUPED | {"sliding_window": WINDOW, "num_local_experts": 4}),
    "gemma2": ("Gemma2Config", EIGHT | MIXED | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", EIGHT | MIXED),
    "gemma3-images": (
        "Gemma3Config",
        {"text_config": EIGHT | MIXED, "mm_tokens_per_image": 4, "vision_config": VISION,
         "image_token_index": 287, "boi_token_index": 286, "eoi_token_index": 285},
    ),
    "phi": ("PhiConfig", GROUPED),
    "phi3": ("Phi3Config", GROUPED),
    "phi3-window": ("Phi3Config", GROUPED | {"sliding_window": WINDOW}),
    "phi3-longrope": (
        "Phi3Config",
        GROUPED | {"max_position_embeddings": 128, "original_max_position_embeddings": 48, "rope_parameters": LONGROPE},
    ),
    "gpt2": ("GPT2Config", SIZES | {"initializer_range": 0.3}),
    "gpt-neox": ("GPTNeoXConfig", SIZES | {"intermediate_size": 48, "initializer_range": 0.3}),
    "granite": ("GraniteConfig", GROUPED | {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "gpt-oss": ("GptOssConfig", EIGHT | MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4TextConfig",
        EIGHT | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": WINDOW,
                 "layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0] * 2},
    ),
    "cohere2": ("Cohere2Config", GROUPED | MIXED),
    "olmo3": ("Olmo3Config", GROUPED | MIXED),
    "smollm3": ("SmolLM3Config", GROUPED),
    "starcoder2": ("Starcoder2Config", GROUPED | {"sliding_window": WINDOW}),
    "opt": ("OPTConfig", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "deepseek-v3": (
        "DeepseekV3Config",
        GROUPED | MOE | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                         "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2,
                         "topk_group": 1, "first_k_dense_replace": 1},
    ),
}  # fmt: skip

# softmax, rope or routing is computed in float32 whatever the weights are
PARTLY_FLOAT32 = {"gemma2", "gpt_oss", "llama4_text", "deepseek_v3"}


def save_tiny_model(folder: Path, tokenizer: PreTrainedTokenizerFast, kind: str, settings: dict[str, Any]) -> Path:
    """Save a random causal LM of a config class of transformers, and the tokenizer."""
    config = getattr(transformers, kind)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name and "ln_" not in name:  # biases and sinks start at zero
                torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Case:
    """A tiny target with prompts and what transformers writes after each of them alone."""

    target: Target
    prompts: list[list[int]]
    texts: list[list[int]]

    def scripted(self, length: int, wrong: int, tree: bool) -> ScriptedDrafter:
        texts = {tuple(prompt): text for prompt, text in zip(self.prompts, self.texts, strict=True)}
        return ScriptedDrafter(texts, length, wrong, tree, VOCABULARY)


def make_case(target: Target, lengths: tuple[int, ...] = LENGTHS, new: int = NEW) -> Case:
    source = random.Random(3)
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        texts.append(out[0, len(prompt) :].tolist())
    return Case(target, prompts, texts)


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Case:
    folder = save_tiny_model(tmp_path_factory.mktemp(request.param), tiny_tokenizer, *MODELS[request.param])
    target = Target.load(str(folder), dtype="float64", device="cpu")
    target.model.set_experts_implementation("eager")  # the grouped product knows no float64
    return make_case(target)


def test_greedy_ids_equal_generate(case: Case) -> None:
    """cases.md 24: for every drafter, alone and in ragged batches of 2 and 5."""
    assert case.target.config.model_type in TESTED
    assert any(len(prompt) + len(text) > 2 * WINDOW for prompt, text in zip(case.prompts, case.texts, strict=True))
    drafters: list[Drafter] = [
        NoDrafter(),
        LookupDrafter(draft_length=4, longest=2),
        case.scripted(5, 3, tree=False),
        case.scripted(3, 4, tree=True),
    ]
    for drafter, (first, end) in itertools.product(drafters, [(2, 3), (3, 5), (0, 5)]):
        ledger = decode(case.target, drafter, case.prompts[first:end], Settings(max_new_tokens=NEW))
        assert [output.ids for output in ledger.outputs] == case.texts[first:end], (drafter.name, first, end)
        ledger.check()
    accepted = sum(row.accepted for row in ledger.rounds)
    assert accepted > 0, "nothing was accepted: the tree's commits were not tried"


def test_tree_states_equal_paths_alone(case: Case) -> None:
    """cases.md 23, twice in a row: the second tree stands on a committed path whose slots had to be moved."""
    target = case.target
    shape = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    texts = [list(case.prompts[1]), list(case.prompts[2])]
    passes = TargetPasses(target, 2, 40, drafts=6)
    passes.prefill(texts)
    tolerance = 1e-5 if target.config.model_type in PARTLY_FLOAT32 else 1e-9
    generator = torch.Generator().manual_seed(1)
    for accepted in ([5, 2], [0, 6]):
        tokens_B7 = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
        tree = DraftTree.static(tokens_B7[:, 0], tokens_B7[:, 1:], shape)
        logits_BNV = target.logits(passes.verify(tree).last)
        for row, node in itertools.product(range(2), range(7)):
            path = [step for step in tree.paths()[row, node].tolist() if step >= 0]
            alone = torch.tensor([[*texts[row], *tree.tokens_BN[row, path].tolist()]])
            with torch.no_grad():
                expected_V = target.model(alone, use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits_BNV[row, node], expected_V, rtol=0, atol=tolerance)
        path_BL = tree.paths()[torch.arange(2), torch.tensor(accepted)]
        counts_B = (path_BL >= 0).sum(1)
        for row in range(2):
            texts[row] += tree.tokens_BN[row, path_BL[row, : counts_B[row]]].tolist()
        passes.commit(tree, path_BL, counts_B, counts_B.tolist())
        assert passes.cache.lengths == list(map(len, texts))
