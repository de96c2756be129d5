"""The frozen model that heads are trained for: its states, its own output function, its identity.

Shapes: B rows, T positions, H hidden, V vocabulary. `last` is the state after the final norm. Tap i is the residual
stream ENTERING layer i, transformers' `hidden_states[i]` (0 <= i < layers), so tap 2 is the output of layer 1.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig

from heads.embedded import EMBEDDED, embedded_folder
from heads.errors import HeadwayError
from heads.gguf_target import SUFFIX, gguf_folder
from heads.linear import BF16_UNITS, use_few_rows_linear
from heads.loading import load_causal_lm
from heads.shell import GivenStates, find_decoder, output_shell

DEFAULT_TARGET = EMBEDDED
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 4096
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")  # names that decoders give it
VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")  # keys of a config that identify nothing


def resolve(name: str, revision: str | None = None) -> Path:
    """The local folder of a target: the embedded one by its name, a folder, a GGUF file (converted once), or a Hub id
    (downloaded once).

    Raises HeadwayError when there is no such folder or file, or the Hub has none or cannot be reached.
    """
    if name == EMBEDDED:
        return embedded_folder()
    folder = Path(name).expanduser()
    if folder.suffix == SUFFIX:
        return gguf_folder(folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise HeadwayError(f"{folder}: no config.json there; give a folder saved by save_pretrained")
        return folder
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise HeadwayError(
            f"target '{name}': neither a local folder nor to be had from the Hub ({type(error).__name__}); "
            f"check the path, or use '{EMBEDDED}'"
        ) from error


def fingerprint(folder: Path) -> str:
    """Identity of a target: hex SHA-256 over config, tokenizer, chat template, weight index and samples of each weight.

    Reads SAMPLE_BLOCKS blocks a weight file, so a 64 GB target costs no more than a small one.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for volatile in VOLATILE:
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "model.safetensors.index.json"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    _sample_weights(folder, digest)
    return digest.hexdigest()


def _sample_weights(folder: Path, digest: Any) -> None:
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(SAMPLE_BLOCKS):
                file.seek(max(0, size - SAMPLE_BYTES) * block // (SAMPLE_BLOCKS - 1))
                digest.update(file.read(SAMPLE_BYTES))


def fingerprint_parts(folder: Path) -> dict[str, str]:
    """Hex SHA-256 of a target's config, tokenizer, chat template and weights, each alone: which part is another.

    The tokenizer is what maps text to ids, the template its chat template, wherever it is kept; "" stands for none.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for volatile in VOLATILE:
        config.pop(volatile, None)
    weights = hashlib.sha256()
    _sample_weights(folder, weights)
    return {
        "config": _digest(json.dumps(config, sort_keys=True).encode()),
        "tokenizer": _digest(_tokenizer_bytes(folder)),
        "template": _digest(_template_bytes(folder)),
        "weights": weights.hexdigest(),
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if content else ""


def _tokenizer_bytes(folder: Path) -> bytes:
    """What maps text to ids: of tokenizer.json without the padding and truncation that its last user left in it."""
    path = folder / "tokenizer.json"
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        content = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
        return json.dumps(content, sort_keys=True).encode()
    names = ("tokenizer.model", "vocab.json", "merges.txt")
    return b"".join(name.encode() + (folder / name).read_bytes() for name in names if (folder / name).is_file())


def _template_bytes(folder: Path) -> bytes:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_bytes()
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template")
            if found:
                return found.encode() if isinstance(found, str) else json.dumps(found, sort_keys=True).encode()
    return b""


def auto_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. Raises HeadwayError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise HeadwayError(f"device '{device}': unknown; use auto, cpu, cuda, cuda:1 ...") from error
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise HeadwayError(f"device '{device}': there are {count} CUDA devices here; use auto or cpu, or number from 0")
    return found


def auto_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and on CPUs with bf16 matrix units (AMX, AVX512-BF16), else float32.

    Raises HeadwayError for a name that is not float32, bfloat16, float16 or float64.
    """
    if dtype == "auto":
        fast = device.type != "cpu" or BF16_UNITS
        return torch.bfloat16 if fast else torch.float32
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if dtype not in names:
        raise HeadwayError(f"dtype '{dtype}': unknown; use auto, {', '.join(names)}")
    return names[dtype]


class TargetEnds:
    """A target's embedding and output function, without its layers. What offline training and replay need.

    The output function is the causal LM's own forward with the decoder replaced by given states, so soft caps, biases
    and scales are the model's, whatever they are.
    """

    def __init__(self, model: Any, name: str, folder: Path) -> None:
        self.name, self.path, self._model = name, folder, model
        self.fingerprint = fingerprint(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        config = model.config.get_text_config()
        self.hidden_size, self.vocab_size = int(config.hidden_size), int(config.vocab_size)
        self._given = GivenStates()
        self._shell = output_shell(model, self._given)

    @classmethod
    def load(cls, name: str = DEFAULT_TARGET, dtype: str = "auto", device: str = "auto") -> TargetEnds:
        """Load the few tensors of the ends; no layer is read. Raises HeadwayError as `resolve` does."""
        folder, on = resolve(name), auto_device(device)
        config = AutoConfig.from_pretrained(folder)
        text = config.get_text_config()
        text.num_hidden_layers = 0
        if getattr(text, "layer_types", None):
            text.layer_types = []
        return cls(load_causal_lm(folder, config, auto_dtype(dtype, on), on), name, folder)

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """[V, H] output weight, on the target's device; for initialising heads, not for computing logits."""
        return self._model.get_output_embeddings().weight

    @property
    @torch.no_grad()
    def final_scale(self) -> torch.Tensor:
        """[H] float32: what the final norm multiplies each channel by; ones where there is no such norm.

        Found by what the norm does to states of length 1 a channel: Gemma keeps its scale less one, GPT-2 has a bias too.
        """
        decoder = find_decoder(self._model)
        norm = next((found for name in FINAL_NORMS if (found := getattr(decoder, name, None)) is not None), None)
        if norm is None:
            return torch.ones(self.hidden_size)
        weight = self.lm_head_weight
        signs_H = 1 - 2 * (torch.arange(self.hidden_size, device=weight.device) % 2).to(weight.dtype)
        return ((norm(signs_H) - norm(-signs_H)) * signs_H / 2).float()

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] token ids -> [..., H]."""
        return self._model.get_input_embeddings()(ids)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[..., H] states after the final norm -> [..., V] logits by the model's own output function.

        The weights are frozen; a gradient goes through to `last` where it asks for one.
        """
        self._given.last = last.reshape(1, -1, last.shape[-1])
        try:
            logits = self._shell(inputs_embeds=self._given.last, use_cache=False).logits
        finally:
            self._given.last = None
        return logits.reshape(*last.shape[:-1], -1)


@dataclass(frozen=True)
class States:
    """States of one forward pass: `last` [B, T, H] and each tap [B, T, H]."""

    last: torch.Tensor
    taps: dict[int, torch.Tensor]


class Target:
    """A frozen causal LM of transformers with its tokenizer and its ends.

    Attributes: name, path, model, tokenizer, config (the text config), fingerprint, dtype, device, num_layers,
    hidden_size, vocab_size, eos_ids (stop tokens of its generation config), max_positions.
    """

    def __init__(self, model: Any, name: str, folder: Path) -> None:
        self.model, self.name, self.path = model, name, folder
        self.ends = TargetEnds(model, name, folder)
        self.tokenizer, self.fingerprint = self.ends.tokenizer, self.ends.fingerprint
        self.config = model.config.get_text_config()
        self.dtype, self.device = model.dtype, model.device
        self.num_layers, self.max_positions = int(self.config.num_hidden_layers), _max_positions(self.config)
        self.hidden_size, self.vocab_size = self.ends.hidden_size, self.ends.vocab_size
        self.decoder: Any = find_decoder(model)
        self.layers = _layers(self.decoder, self.num_layers)
        self.eos_ids = stop_ids(model.generation_config, self.tokenizer)

    @classmethod
    def load(
        cls, name: str = DEFAULT_TARGET, dtype: str = "auto", device: str = "auto", *, tensor_parallel: bool = False
    ) -> Target:
        """Load a target by the name `resolve` takes; `tensor_parallel`: one target over all processes, which then call it together.

        Raises HeadwayError for an unknown name or dtype, a model that is no causal LM, and as `load_causal_lm` does.
        """
        folder, on = resolve(name), auto_device(device)
        kind, config = auto_dtype(dtype, on), AutoConfig.from_pretrained(folder)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise HeadwayError(
                f"{folder}: '{config.model_type}' is no causal language model; choose a decoder-only one"
            )
        model = load_causal_lm(folder, config, kind, on, tensor_parallel=tensor_parallel)
        if on.type == "cpu" and not tensor_parallel:
            use_few_rows_linear(model)
        return cls(model, name, folder)

    @torch.no_grad()
    def states(
        self, ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor | None = None, taps: Sequence[int] = ()
    ) -> States:
        """One forward pass without a cache. Raises HeadwayError for a tap that is no layer's input."""
        with self.capture(taps) as captured:
            output = self.decoder(input_ids=ids_BT, attention_mask=attention_mask_BT, use_cache=False)
        return States(output.last_hidden_state, captured)

    @contextmanager
    def capture(self, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Hooks on the tapped layers only: after a forward pass the yielded dict holds tap -> [B, T, H]."""
        captured: dict[int, torch.Tensor] = {}
        handles = []
        for tap in taps:
            if not 0 <= tap < self.num_layers:
                raise HeadwayError(f"tap {tap}: target '{self.name}' has layers 0 to {self.num_layers - 1}")

            def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tap: int = tap) -> None:
                captured[tap] = args[0] if args else kwargs["hidden_states"]

            handles.append(self.layers[tap].register_forward_pre_hook(keep, with_kwargs=True))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[..., H] states after the final norm -> [..., V] logits."""
        return self.ends.logits(last)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] token ids -> [..., H]."""
        return self.ends.embed(ids)


def _layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise HeadwayError(f"{type(decoder).__name__}: no list of {count} layers found; this architecture is not supported")


def _max_positions(config: Any) -> int:
    """Positions that a text may have; no stated limit (recurrent models, ALiBi) is as good as endless."""
    for name in ("max_position_embeddings", "n_positions"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return sys.maxsize


def stop_ids(generation: GenerationConfig, tokenizer: Any) -> tuple[int, ...]:
    """The ids that a target stops at: of its generation config, else of its tokenizer."""
    given = generation.eos_token_id if generation.eos_token_id is not None else tokenizer.eos_token_id
    return as_ids(given)


def as_ids(given: int | Sequence[int] | torch.Tensor | None) -> tuple[int, ...]:
    """What a generation config may hold as token ids: one, several, a tensor of them, or none."""
    return () if given is None else tuple(torch.as_tensor(given, dtype=torch.int64).flatten().tolist())
