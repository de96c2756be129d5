"""heads/convert.py as a person starts it: what it prints, writes and refuses; the files of foreign heads; nothing half done."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import heads
from heads import convert
from heads.errors import HeadwayError
from heads.formats import files
from heads.formats.files import read_foreign
from heads.formats.layout import TargetFacts
from heads.formats.layouts import export_head, read_head
from heads.formats.recognise import recognise
from heads.formats.serving import serving_commands
from tests.conftest import save_tiny_target
from tests.heads.foreign import (
    eagle1_head,
    eagle1_tensors,
    eagle3_config,
    eagle3_head,
    eagle3_tensors,
    medusa_head,
    medusa_tensors,
    same,
    save,
    speculators_config,
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    convert.main()


def test_there_and_back_by_command(
    tmp_path: Path, target: TargetFacts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The manifest of one of ours names the target; through three layouts the head stays the same."""
    head = eagle3_head(target.vocab_size)
    head.manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}, "seed": 5}
    head.save_pretrained(tmp_path / "head")
    for source, to, out in (
        ("head", "vllm", "a"),
        ("a", "speculators", "b"),
        ("b", "sglang", "c"),
        ("c", "headway", "d"),
    ):
        run(monkeypatch, "--head", tmp_path / source, "--to", to, "--out", tmp_path / out)
    assert sorted(os.listdir(tmp_path / "a")) == ["SERVING.md", "config.json", "headway.json", "model.safetensors"]
    back = heads.load_head(tmp_path / "d")
    same(back, head)
    assert (back.config, back.manifest) == (head.config, head.manifest)
    said = capsys.readouterr().out
    assert "headway layout, kind eagle3" in said
    assert f"vllm serve {target.name}" in said
    assert "python eval/measure.py" in said
    with pytest.raises(HeadwayError, match=r"there is something already"):
        run(monkeypatch, "--head", tmp_path / "head", "--to", "vllm", "--out", tmp_path / "a")
    with pytest.raises(HeadwayError, match=r"see --help"):
        run(monkeypatch, "--head", tmp_path / "head", "--to", "ollama", "--out", tmp_path / "e")
    with pytest.raises(HeadwayError, match=r"--taps 1,x: give layer numbers"):
        run(monkeypatch, "--head", tmp_path / "a", "--to", "headway", "--out", tmp_path / "e", "--taps", "1,x")


def test_the_commands_are_what_the_engines_parse(target: TargetFacts):
    (vllm,) = serving_commands("eagle3-raw", "vllm", target, "a dir/head", 4, "bfloat16")
    words = shlex.split(vllm.line)
    assert words[:3] == ["vllm", "serve", target.name]
    settings = json.loads(words[words.index("--speculative-config") + 1])
    assert settings == {"method": "eagle3", "model": "a dir/head", "num_speculative_tokens": 4}
    (sglang,) = serving_commands("eagle3-raw", "sglang", target, "head", 4, "bfloat16")
    words = shlex.split(sglang.line)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert flags["--speculative-num-steps"] == "4"
    assert flags["--speculative-eagle-topk"] == "1"
    assert flags["--speculative-num-draft-tokens"] == "5"  # the root is one of them
    methods = {"eagle": "eagle", "medusa-engine": "medusa", "speculators": "eagle3"}
    for layout, method in methods.items():
        *_, last = serving_commands(layout, "vllm", target, "head", 3, "float32")
        assert f'"method": "{method}"' in last.line
    assert serving_commands("medusa", "medusa", target, "head", 3, "float32") == ()


def test_serving_says_who_still_reads_medusa(tmp_path: Path, target: TargetFacts):
    export_head(medusa_head(target.vocab_size), target, "vllm", tmp_path / "out")
    text = (tmp_path / "out" / "SERVING.md").read_text()
    assert "vLLM 0.33 and SGLang 0.5.14 carry no Medusa any more" in text
    assert '"num_speculative_tokens": 3' in text


def folders(vocab: int, where: Path) -> dict[str, Path]:
    return {
        "eagle3-raw": save(where / "1", eagle3_config(vocab), eagle3_tensors(vocab), "pytorch_model.bin"),
        "speculators": save(where / "2", speculators_config(vocab), eagle3_tensors(vocab, "layers.0.")),
        "eagle": save(where / "3", eagle3_config(vocab, architectures=["LlamaForCausalLM"]), eagle1_tensors()),
        "medusa": save(where / "4", {}, medusa_tensors(vocab), "medusa_lm_head.pt"),
    }


def test_foreign_folders_are_told_apart_and_load_head_names_the_command(tmp_path: Path, target: TargetFacts):
    for layout, folder in folders(target.vocab_size, tmp_path).items():
        assert recognise(folder) == layout
        with pytest.raises(
            HeadwayError, match=rf"{layout} layout; .*convert\.py --head {folder} --target TARGET --to headway"
        ):
            heads.load_head(folder)
    eagle1_head(target.vocab_size).save_pretrained(tmp_path / "ours")
    assert recognise(tmp_path / "ours") == "headway"
    (tmp_path / "nothing").mkdir()
    assert recognise(tmp_path / "nothing") is None
    with pytest.raises(HeadwayError, match=r"no head of a layout that is known"):
        read_head(tmp_path / "nothing", target.name)
    save(tmp_path / "model", {"model_type": "llama"}, {"model.norm.weight": torch.ones(3)})
    with pytest.raises(HeadwayError, match=r"no head of a layout that is known"):
        read_head(tmp_path / "model", target.name)
    with pytest.raises(HeadwayError, match=r"a dflash head"):
        recognise(save(tmp_path / "dflash", {"dflash_config": {}}, {"fc.weight": torch.ones(3)}))


def test_another_target_is_said(tmp_path: Path, target: TargetFacts, tiny_tokenizer: Any):
    other = save_tiny_target(tmp_path / "other", tiny_tokenizer, seed=1, num_hidden_layers=8)
    head = eagle3_head(target.vocab_size)
    head.manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    export_head(head, target, "vllm", tmp_path / "out")
    assert read_head(tmp_path / "out").notes[-1].startswith("taps")
    assert "another model than" in read_head(tmp_path / "out", str(other)).notes[-1]


def test_shards_are_read_as_one(tmp_path: Path, target: TargetFacts):
    tensors = eagle3_tensors(target.vocab_size)
    names = sorted(tensors)
    save(tmp_path, eagle3_config(target.vocab_size), {name: tensors[name] for name in names[::2]}, "a.safetensors")
    save(tmp_path, eagle3_config(target.vocab_size), {name: tensors[name] for name in names[1::2]}, "b.safetensors")
    index = {"weight_map": {name: "ab"[at % 2] + ".safetensors" for at, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_foreign(tmp_path)
    assert set(found.tensors) == set(tensors)
    assert recognise(tmp_path) == "eagle3-raw"
    index["weight_map"]["fc.weight"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HeadwayError, match=r"does not name files beside it"):
        read_foreign(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_damaged_and_hostile_files_are_refused(tmp_path: Path, target: TargetFacts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    vocab = target.vocab_size
    for name in ("pytorch_model.bin", "model.safetensors"):
        folder = save(tmp_path / name, eagle3_config(vocab), eagle3_tensors(vocab), name)
        whole = (folder / name).read_bytes()
        for length in (0, 7, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:length])
            with pytest.raises(HeadwayError, match=f"{name}: cannot be read"):
                read_foreign(folder)
    folder = save(tmp_path / "evil", eagle3_config(vocab), {}, "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}, protocol=2))
    with pytest.raises(HeadwayError, match=r"cannot be read"):
        recognise(folder)
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(HeadwayError, match=r"not a state dict"):
        recognise(folder)
    assert not (tmp_path / "made-by-a-pickle").exists()
    for text in ("{", "[]", "\ud800".encode("utf-8", "surrogatepass")):
        (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(HeadwayError, match=r"config.json: not "):
            recognise(folder)


def test_mixed_dtypes_are_read_without_loss(tmp_path: Path, target: TargetFacts):
    tensors = eagle3_tensors(target.vocab_size)
    tensors["fc.weight"], tensors["norm.weight"] = tensors["fc.weight"].half(), tensors["norm.weight"].bfloat16()
    tensors["d2t"] = tensors["d2t"].int()
    found = read_head(save(tmp_path / "head", eagle3_config(target.vocab_size), tensors), target.name)
    assert {tensor.dtype for tensor in found.head.parameters()} == {torch.float32}
    assert torch.equal(found.head.fc.weight, tensors["fc.weight"].float())
    assert any("are mixed" in note for note in found.notes)


class Killed(BaseException):
    """Stands for a SIGKILL at one call."""


@pytest.mark.parametrize("call", ["save_file", "chmod", "replace"])
def test_an_export_appears_whole_or_not_at_all(
    tmp_path: Path, target: TargetFacts, monkeypatch: pytest.MonkeyPatch, call: str
):
    def die(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(files if call == "save_file" else files.os, call, die)
    with pytest.raises(Killed):
        export_head(eagle3_head(target.vocab_size), target, "vllm", tmp_path / "out")
    assert not list(tmp_path.iterdir())
