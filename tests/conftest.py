"""Tiny stand-ins that every test shares: a tokenizer of 288 tokens, a random Llama of 4 layers, 24 conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the cat sat on a mat and saw red blue sun moon while 12 dogs ran home to eat warm bread, then slept well."
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a conversations file: 1 to 3 exchanges of random words, every third one with a system turn."""
    source = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(source.choices(TEXT.split(), k=source.randint(1, most)))

    rows: list[dict[str, Any]] = []
    for number in range(count):
        messages = [{"role": "system", "content": "be kind"}] if number % 3 == 0 else []
        for _ in range(source.randint(1, 3)):
            messages.append({"role": "user", "content": words(8)})
            messages.append({"role": "assistant", "content": words(12)})
        rows.append({"id": f"tiny-{seed}-{number:04d}", "messages": messages, "finish_reason": "stop"})
    return rows


def random_answers(count: int, words: int) -> list[dict[str, Any]]:
    """Rows of a conversations file: a number as the question, so many random words as the answer."""
    source = random.Random(0)
    return [
        {
            "id": f"answer-{number}",
            "messages": [
                {"role": "user", "content": str(number)},
                {"role": "assistant", "content": " ".join(source.choices(TEXT.split(), k=words))},
            ],
            "finish_reason": "stop",
        }
        for number in range(count)
    ]


def write_conversations(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save_tiny_target(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **config: Any) -> Path:
    """Save a random fp32 Llama (hidden 32, 4 layers, 4 heads, 2 KV heads) and its tokenizer; `config` overrides."""
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # wide, so that logits differ enough for argmax to mean something
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, 288 tokens, ChatML template; the stop token `<|im_end|>` is the pad token too, as in SmolLM2."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    base.train_from_iterator([TEXT, "system user assistant"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """Folder of the tiny random Llama with its tokenizer, as any local target."""
    return save_tiny_target(tmp_path_factory.mktemp("tiny-target"), tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversations file (JSON lines) of 24 rows, ids tiny-0-0000 to tiny-0-0023."""
    return write_conversations(tmp_path_factory.mktemp("tiny-conversations") / "tiny.jsonl", make_conversations(24))
