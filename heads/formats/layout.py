"""What every layout is: a reader, a writer, and the facts of the target that both of them need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from heads.checkpoint import Head
from heads.embedded import EMBEDDED
from heads.errors import HeadwayError
from heads.formats.files import Foreign
from heads.target import TargetEnds, fingerprint, resolve

VLLM, SGLANG = "vllm", "sglang"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class TargetFacts:
    """A target's sizes; of its weights the embedding alone is ever loaded, and only where a layout carries it.

    `hub_id`: what others find it under, for files that leave this machine; None where they stay.
    """

    name: str
    folder: Path
    config: Any
    architectures: tuple[str, ...]
    fingerprint: str
    hub_id: str | None = None

    @classmethod
    def load(cls, name: str) -> TargetFacts:
        """By a name that heads.target.resolve takes. Raises HeadwayError as that does."""
        folder = resolve(name)
        config = AutoConfig.from_pretrained(folder)
        return cls(name, folder, config.get_text_config(), tuple(config.architectures or ()), fingerprint(folder))

    @property
    def served_name(self) -> str:
        """What an engine finds it under: a Hub id, or a folder."""
        return self.hub_id or (str(self.folder) if self.name == EMBEDDED else self.name)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """None where the target states no limit."""
        found = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        return None if found is None else int(found)

    @cached_property
    def embedding_VH(self) -> Tensor:
        """What the target's embedding function gives for every id, scales included, in float32."""
        ends = TargetEnds.load(self.name, "float32", "cpu")
        return ends.embed(torch.arange(self.vocab_size))


@dataclass(frozen=True)
class Exported:
    """A head in a layout: its config, tensors and the name of the file that holds them; what the person should know.

    `head`: what was written, where that is another head than the one given.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights_name: str = "model.safetensors"
    notes: tuple[str, ...] = ()
    head: Head | None = None


Reader = Callable[[Foreign, TargetFacts, tuple[int, ...] | None], Head]
"""(folder's content, target, taps to take instead of the config's) -> head. Raises HeadwayError."""
Writer = Callable[[Any, TargetFacts, str, int], Exported]
"""(head, target, engine, tokens drafted a round) -> what to write. Raises HeadwayError with what cannot be carried."""


@dataclass(frozen=True)
class Layout:
    """One checkpoint layout: `title` for messages."""

    name: str
    title: str
    read: Reader
    write: Writer


def refuse(what: str, layout: str, remedy: str) -> HeadwayError:
    """The error for something a head has and a layout has no place for."""
    return HeadwayError(f"{what}: the {layout} cannot carry that; {remedy}")


def check_target(where: Path, target: TargetFacts, hidden_size: int, vocab_size: int) -> None:
    """Raise HeadwayError where a file's sizes are not the target's."""
    for what, own, theirs in (
        ("hidden size", hidden_size, target.hidden_size),
        ("vocabulary", vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise HeadwayError(
                f"{where}: made for a {what} of {own}, target '{target.name}' has {theirs}; give the target of this head"
            )


def check_embedding(foreign: Foreign, target: TargetFacts, name: str = EMBEDDING) -> None:
    """Take the file's copy of the target's embedding out. Raises HeadwayError where it is another one: heads use the target's."""
    own_VH = foreign.tensors.pop(name, None)
    if own_VH is None:
        return
    wanted_VH = target.embedding_VH
    if own_VH.shape != wanted_VH.shape:
        raise HeadwayError(
            f"{foreign.weights}: tensor `{name}` has shape {list(own_VH.shape)}, the target's is {list(wanted_VH.shape)}"
        )
    # either side may have been rounded to bfloat16 or float16 on its way here
    if not torch.allclose(own_VH.float(), wanted_VH, rtol=2**-7, atol=1e-6):
        raise HeadwayError(
            f"{foreign.weights}: `{name}` is not the embedding of '{target.name}'; either the head belongs to another target, "
            "or it has an embedding of its own, which heads here do not"
        )
    foreign.note(f"left out {name}: it is the target's own embedding")
