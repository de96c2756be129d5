"""Quantised copies of a tiny target, and what their values are: 8-bit blocks of GGUF, and FP8 with a scale for each block.

Shapes: O rows of a weight, I columns, B blocks of a row.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

GGUF_BLOCK, FP8_BLOCK, FP8_MOST = 32, 16, 448.0
# Where llama.cpp keeps what transformers calls otherwise.
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(target: Path, file: Path) -> dict[str, Tensor]:
    """Write a Llama's folder as a GGUF file, matrices in Q8_0, its tokenizer beside it; what the weights then are."""
    config = AutoConfig.from_pretrained(target)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    expected = {}
    for name, weight in load_file(target / "model.safetensors").items():
        expected[name] = weight if weight.dim() == 1 else _rounded_q8(weight)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        data = (_interleaved(weight, heads) if heads else weight).numpy()
        if weight.dim() == 1:
            writer.add_tensor(_gguf_name(name), data)
        else:
            packed = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for beside in target.glob("token*"):
        shutil.copy(beside, file.parent)
    shutil.copy(target / "chat_template.jinja", file.parent)
    return expected


def _gguf_name(name: str) -> str:
    plain = name.removesuffix(".weight")
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if plain in ends:
        return f"{ends[plain]}.weight"
    _, _, layer, rest = plain.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _interleaved(weight_OI: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp turns them: the two halves of a head's rotary pairs one beside the other."""
    return weight_OI.view(heads, 2, -1, weight_OI.shape[1]).transpose(1, 2).reshape(weight_OI.shape).contiguous()


def _rounded_q8(weight_OI: Tensor) -> Tensor:
    """Each block of 32 as 127 steps of its largest value; the step is kept in 16 bits, the numbers are made with the whole one."""
    blocks_OBI = weight_OI.numpy().reshape(len(weight_OI), -1, GGUF_BLOCK)
    step_OB1 = np.abs(blocks_OBI).max(-1, keepdims=True) / np.float32(127)
    numbers = blocks_OBI * np.divide(1, step_OB1, out=np.zeros_like(step_OB1), where=step_OB1 != 0)
    rounded = np.sign(numbers) * np.floor(np.abs(numbers) + 0.5)
    return torch.from_numpy((rounded * step_OB1.astype(np.float16).astype(np.float32)).reshape(weight_OI.shape))


def write_fp8(target: Path, folder: Path) -> dict[str, Tensor]:
    """A copy of a folder whose layers' matrices are in FP8, as served ones are; what the weights then are."""
    shutil.copytree(target, folder)
    written, expected = {}, {}
    for name, weight_OI in load_file(target / "model.safetensors").items():
        if ".layers." not in name or weight_OI.dim() == 1:
            written[name] = expected[name] = weight_OI
            continue
        rows, columns = (size // FP8_BLOCK for size in weight_OI.shape)
        blocks = weight_OI.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
        scale = blocks.abs().amax((1, 3), keepdim=True) / FP8_MOST
        small = (blocks / scale).to(torch.float8_e4m3fn)
        written[name] = small.reshape(weight_OI.shape)
        written[name.replace(".weight", ".weight_scale_inv")] = scale.view(rows, columns)
        expected[name] = (small.float() * scale).reshape(weight_OI.shape)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    declare(
        folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    )
    return expected


def declare(folder: Path, quantisation: dict[str, Any] | None) -> None:
    """Put a quantization_config into a folder's config, or take it out."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config))
