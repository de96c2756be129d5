"""The target's states, ends and identity, against transformers' own outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
)

from heads.errors import HeadwayError
from heads.linear import few_rows_linear
from heads.target import Target, TargetEnds, auto_dtype, fingerprint, fingerprint_parts, resolve
from tests.conftest import save_tiny_target

SIZES = {"vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}  # fmt: skip
ODD_ENDS = [
    (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),  # soft cap, scaled embedding
    (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=7.0)),  # divided logits
    (PhiForCausalLM, PhiConfig(**SIZES)),  # a head with a bias
]


@pytest.fixture(scope="module")
def ids_BT() -> torch.Tensor:
    return torch.randint(0, 288, (3, 11), generator=torch.Generator().manual_seed(1))


def test_states_equal_transformers_hidden_states(tiny_target_dir: Path, ids_BT: torch.Tensor) -> None:
    target = Target.load(str(tiny_target_dir), dtype="float64", device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float64)
    with torch.no_grad():
        expected = reference(ids_BT, output_hidden_states=True)
    states = target.states(ids_BT, taps=(0, 1, 3))
    for tap in (0, 1, 3):
        torch.testing.assert_close(states.taps[tap], expected.hidden_states[tap], rtol=0, atol=1e-12)
    torch.testing.assert_close(states.last, expected.hidden_states[-1], rtol=0, atol=1e-12)
    torch.testing.assert_close(target.logits(states.last), expected.logits, rtol=0, atol=1e-12)


def test_a_tap_that_is_no_layer_is_refused(tiny_target_dir: Path, ids_BT: torch.Tensor) -> None:
    target = Target.load(str(tiny_target_dir), device="cpu")
    with pytest.raises(HeadwayError, match=r"tap 4: .*layers 0 to 3"):
        target.states(ids_BT, taps=(4,))


@pytest.mark.parametrize(("kind", "config"), ODD_ENDS, ids=lambda value: getattr(value, "__name__", ""))
def test_ends_apply_the_models_own_output_function(
    kind: type, config: object, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, ids_BT: torch.Tensor
) -> None:
    torch.manual_seed(0)
    model = kind(config)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(ids_BT, output_hidden_states=True)
    ends = TargetEnds.load(str(tmp_path), dtype="float32", device="cpu")
    last = expected.hidden_states[-1]
    torch.testing.assert_close(ends.logits(last), expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(ends.logits(last[1, 4]), expected.logits[1, 4], rtol=0, atol=1e-5)
    plain = last @ reference.get_output_embeddings().weight.T
    assert (plain - expected.logits).abs().max() > 0.01, "the lm_head alone would have passed this test"


@pytest.mark.parametrize(
    ("kind", "config", "name", "kept"),
    [
        (GraniteForCausalLM, GraniteConfig(**SIZES), "model.norm", 0.0),
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8), "model.norm", 1.0),  # its weight is the scale less one
        (PhiForCausalLM, PhiConfig(**SIZES), "model.final_layernorm", 0.0),  # LayerNorm, with a bias
        (GPT2LMHeadModel, GPT2Config(vocab_size=288, n_embd=32, n_layer=2, n_head=4), "transformer.ln_f", 0.0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_final_norms_scale(
    kind: type, config: object, name: str, kept: float, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.get_submodule(name).parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    ends = TargetEnds.load(str(tmp_path), dtype="float32", device="cpu")
    torch.testing.assert_close(ends.final_scale, model.get_submodule(name).weight.detach() + kept, rtol=2e-5, atol=2e-6)


def test_fingerprint_tells_targets_apart(tiny_target_dir: Path, tmp_path: Path) -> None:
    same = shutil.copytree(tiny_target_dir, tmp_path / "same")
    assert fingerprint(same) == fingerprint(tiny_target_dir)
    tuned = shutil.copytree(tiny_target_dir, tmp_path / "tuned")
    weights = load_file(tuned / "model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, tuned / "model.safetensors", {"format": "pt"})
    templated = shutil.copytree(tiny_target_dir, tmp_path / "templated")
    (templated / "chat_template.jinja").write_text("{{ messages }}")
    other = shutil.copytree(tiny_target_dir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert len({fingerprint(folder) for folder in (same, tuned, templated, other)}) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_one_weight_file_or_several(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, ids_BT: torch.Tensor, tied: bool
) -> None:
    """Case 18: also with tied embeddings, and with more rows of the output than the tokenizer has tokens."""
    padded = {"vocab_size": len(tiny_tokenizer) + 32, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    single = save_tiny_target(tmp_path / "single", tiny_tokenizer, **padded)
    model = AutoModelForCausalLM.from_pretrained(single, dtype=torch.float32)
    several = tmp_path / "several"
    model.save_pretrained(several, max_shard_size="20KB")
    tiny_tokenizer.save_pretrained(several)
    assert len(list(single.glob("*.safetensors"))) == 1
    assert len(list(several.glob("*.safetensors"))) > 2
    with torch.no_grad():
        expected = model(ids_BT, output_hidden_states=True)
    for folder in (single, several):
        target, ends = (kind.load(str(folder), "float32", "cpu") for kind in (Target, TargetEnds))
        assert target.vocab_size == ends.vocab_size == 320
        assert torch.equal(ends.lm_head_weight, model.get_output_embeddings().weight)
        assert torch.equal(ends.lm_head_weight, model.get_input_embeddings().weight) == tied
        states = target.states(ids_BT, taps=(1,))
        torch.testing.assert_close(states.taps[1], expected.hidden_states[1], rtol=0, atol=1e-5)
        torch.testing.assert_close(ends.logits(states.last), expected.logits, rtol=0, atol=1e-5)


def test_unknown_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HeadwayError, match="neither a local folder nor to be had from the Hub"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(HeadwayError, match=r"no config\.json there"):
        resolve(str(tmp_path))
    with pytest.raises(HeadwayError, match="dtype 'bf16': unknown; use auto, float32"):
        auto_dtype("bf16", torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 2, 5, 600])
def test_few_rows_linear_equals_linear(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(1, rows, 24), torch.randn(40, 24), torch.randn(40)
    for given in (None, bias):
        expected = (x.double() @ weight.double().T + (0 if given is None else given.double())).float()
        torch.testing.assert_close(few_rows_linear(x, weight, given), expected, rtol=1e-5, atol=1e-5)


def test_parts_of_a_fingerprint_name_what_is_another(tiny_target_dir: Path, tmp_path: Path) -> None:
    parts = fingerprint_parts(tiny_target_dir)
    assert list(parts) == ["config", "tokenizer", "template", "weights"]

    def changed(name: str, content: str | None, file: str) -> set[str]:
        folder = shutil.copytree(tiny_target_dir, tmp_path / name)
        text = (folder / file).read_text() if file.endswith("json") else ""
        (folder / file).write_text(text if content is None else content)
        return {part for part, digest in fingerprint_parts(folder).items() if digest != parts[part]}

    config = json.loads((tiny_target_dir / "config.json").read_text())
    tokenizer = json.loads((tiny_target_dir / "tokenizer.json").read_text())
    assert changed("config", json.dumps(config | {"rms_norm_eps": 1e-3}), "config.json") == {"config"}
    assert changed("dtype", json.dumps(config | {"dtype": "bfloat16"}), "config.json") == set()
    assert changed("split", json.dumps(tokenizer | {"pre_tokenizer": None}), "tokenizer.json") == {"tokenizer"}
    padded = {"padding": {"strategy": "BatchLongest"}, "truncation": {"max_length": 9}}
    assert changed("padded", json.dumps(tokenizer | padded), "tokenizer.json") == set()
    assert changed("template", "{{ messages }}", "chat_template.jinja") == {"template"}
    tuned = shutil.copytree(tiny_target_dir, tmp_path / "tuned")
    weights = load_file(tuned / "model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, tuned / "model.safetensors", {"format": "pt"})
    assert {part for part, digest in fingerprint_parts(tuned).items() if digest != parts[part]} == {"weights"}


def test_a_template_in_the_tokenizers_config_counts(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Where older folders keep it."""
    folder = shutil.copytree(tiny_target_dir, tmp_path / "old")
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": text}))
    assert fingerprint_parts(folder) == fingerprint_parts(tiny_target_dir)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert fingerprint_parts(folder)["template"] == ""
