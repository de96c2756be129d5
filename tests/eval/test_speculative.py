"""SpeculativeDecoder.generate against the target's own generate, option by option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from eval.drafters.lookup import LookupDrafter
from eval.speculative import SpeculativeDecoder
from heads.errors import HeadwayError
from heads.target import Target

PAD = 1  # no stop token of the tiny target


@pytest.fixture(scope="module")
def decoder(tiny_target_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder(Target.load(str(tiny_target_dir), "float64", "cpu"), LookupDrafter(4, 2))


@pytest.fixture(scope="module")
def ids_1T() -> torch.Tensor:
    return torch.randint(3, 288, (1, 9), generator=torch.Generator().manual_seed(5))


def reference(decoder: SpeculativeDecoder, ids_BT: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    return decoder.target.model.generate(ids_BT, generation_config=config, tokenizer=decoder.tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 30},
        {"max_length": 25},
        {"max_new_tokens": 30, "repetition_penalty": 1.4},
        {"max_new_tokens": 30, "sequence_bias": [[[7], 4.0], [[9], -3.0]]},
        {"max_new_tokens": 30, "bad_words_ids": [[5], [6, 7]]},
    ],
    ids=lambda options: ",".join(options),
)
def test_greedy_options_give_what_generate_gives(
    decoder: SpeculativeDecoder, ids_1T: torch.Tensor, options: dict[str, Any]
) -> None:
    config = GenerationConfig(**options)
    assert decoder.generate(ids_1T, config).tolist() == reference(decoder, ids_1T, config).tolist()


@pytest.mark.parametrize("width", [9, 25, 505])
def test_without_a_length_it_is_as_long_as_theirs(decoder: SpeculativeDecoder, width: int) -> None:
    ids = torch.randint(3, 288, (1, width), generator=torch.Generator().manual_seed(width))
    expected = reference(decoder, ids, GenerationConfig(eos_token_id=PAD)).tolist()
    assert len(expected[0]) == min(width + 20, 512)
    assert decoder.generate(ids, GenerationConfig(eos_token_id=PAD)).tolist() == expected


def test_stop_tokens_and_least_lengths(decoder: SpeculativeDecoder, ids_1T: torch.Tensor) -> None:
    stops = list(range(3, 150))  # half of the vocabulary, so that a text soon ends wherever it may
    for options in ({}, {"min_new_tokens": 9}, {"min_length": 20}):
        config = GenerationConfig(max_new_tokens=30, eos_token_id=stops, pad_token_id=PAD, **options)
        expected = reference(decoder, ids_1T, config).tolist()
        assert len(expected[0]) < 39, "the stop tokens did nothing"
        assert decoder.generate(ids_1T, config).tolist() == expected


def test_stop_tokens_in_a_tensor(decoder: SpeculativeDecoder, ids_1T: torch.Tensor) -> None:
    """transformers takes them so, one without a dimension too."""
    for stops in (list(range(3, 150)), reference(decoder, ids_1T, GenerationConfig(max_new_tokens=9))[0, -1].item()):
        expected = reference(decoder, ids_1T, GenerationConfig(max_new_tokens=30, eos_token_id=stops, pad_token_id=PAD))
        assert len(expected[0]) < 39, "the stop tokens did nothing"
        config = GenerationConfig(max_new_tokens=30, eos_token_id=torch.tensor(stops), pad_token_id=PAD)
        assert torch.equal(decoder.generate(ids_1T, config), expected)


def test_stop_strings(decoder: SpeculativeDecoder, ids_1T: torch.Tensor) -> None:
    text = reference(decoder, ids_1T, GenerationConfig(max_new_tokens=30))[0, 9:].tolist()
    ascii_tokens = [token for token in text if decoder.tokenizer.decode([token]).isascii()]
    stop = decoder.tokenizer.decode([ascii_tokens[-1]])
    config = GenerationConfig(max_new_tokens=30, stop_strings=[stop])
    expected = reference(decoder, ids_1T, config).tolist()
    assert len(expected[0]) < 39, "the stop string did nothing"
    assert decoder.generate(ids_1T, config).tolist() == expected
    assert decoder.ledger.outputs[0].stop == "stop"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_give_what_each_row_gives_alone(
    decoder: SpeculativeDecoder, ids_1T: torch.Tensor, side: str
) -> None:
    prompts = [ids_1T[0, :3].tolist(), ids_1T[0].tolist(), ids_1T[0, 2:7].tolist()]
    config = GenerationConfig(max_new_tokens=12, pad_token_id=PAD)
    pads = [[PAD] * (9 - len(prompt)) for prompt in prompts]
    rows = [pad + ids if side == "left" else ids + pad for pad, ids in zip(pads, prompts, strict=True)]
    found = decoder.generate(torch.tensor(rows), config)
    assert found[:, :9].tolist() == rows
    for row, prompt in enumerate(prompts):
        alone = reference(decoder, torch.tensor([prompt]), config)[0, len(prompt) :].tolist()
        assert found[row, 9:].tolist() == alone + [PAD] * (found.shape[1] - 9 - len(alone))


def test_streamer_sees_the_prompt_and_every_token(decoder: SpeculativeDecoder, ids_1T: torch.Tensor) -> None:
    class Record:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.reshape(-1).tolist()

        def end(self) -> None:
            self.ended = True

    record = Record()
    ids = decoder.generate(ids_1T, GenerationConfig(max_new_tokens=10), streamer=record)
    assert record.seen == ids[0].tolist()
    assert record.ended


def test_sampling_follows_the_seed(decoder: SpeculativeDecoder, ids_1T: torch.Tensor) -> None:
    config = GenerationConfig(max_new_tokens=20, do_sample=True, temperature=0.9, top_p=0.95)
    texts = [decoder.generate(ids_1T, config, seed=seed).tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(3)
    first = decoder.generate(ids_1T, config).tolist()
    torch.manual_seed(3)
    assert decoder.generate(ids_1T, config).tolist() == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, "num_beams = 3: not supported"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size = 2: not supported"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate = True: not supported"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences = 2: not supported"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens = 3: not supported"),
        ({"max_length": 4}, "max_length 4: the input has 9 tokens"),
        ({"sequence_bias": [[[7, 8], 4.0]]}, "has several tokens"),
    ],
)
def test_what_is_not_followed_is_refused(
    decoder: SpeculativeDecoder, ids_1T: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(HeadwayError, match=message):
        decoder.generate(ids_1T, GenerationConfig(**options))
