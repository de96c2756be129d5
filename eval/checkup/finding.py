"""A finding: what is wrong with a head, where, and how to mend it. Its code is stable: other programs may ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """What kinds of faults there are; none of these words changes its meaning."""

    TRUNCATED = "truncated"
    """A weight file is cut, damaged or not there."""
    CONFIG = "config"
    """config.json is no config, or says what the tensors, or the head's own papers, contradict."""
    TENSOR_MISSING = "tensor_missing"
    TENSOR_EXTRA = "tensor_extra"
    TENSOR_SHAPE = "tensor_shape"
    NORM_MISSING = "norm_missing"
    """The weights of a norm are not in the file."""
    NORM_SWITCH = "norm_switch"
    """A norm is on or off otherwise than in training."""
    LM_HEAD_LOST = "lm_head_lost"
    """An output matrix is not in the file, or the config ties it to an embedding that it is not."""
    HEAD_DIM = "head_dim"
    """Attention heads, key-value heads and their size are not what the projections were trained as."""
    OVERFLOW = "overflow"
    """Values that float16 cannot hold, in the file or on the way through the head."""
    NOT_FINITE = "not_finite"
    DTYPE = "dtype"
    """The config names another dtype than the file holds."""
    TAPS = "taps"
    """Other layers of the target are read than in training."""
    TAPS_MISSING = "taps_missing"
    """The config names no layers to read, and the engines' own are not those of the training."""
    ROPE = "rope"
    MAX_POSITIONS = "max_positions"
    D2T_ABSOLUTE = "d2t_absolute"
    """`d2t` holds target ids where engines add the draft id to it."""
    MAP_IDENTITY = "map_identity"
    """Draft ids stand for themselves."""
    MAP = "map"
    """The draft vocabulary's map is wrong in another way."""
    HEADS_SWAPPED = "heads_swapped"
    """Medusa heads lie in another order than they were trained for."""
    HEAD_COUNT = "head_count"
    """The config names another number of Medusa heads or layers than the file holds."""
    OTHER_TARGET = "other_target"
    OTHER_TOKENIZER = "other_tokenizer"
    OTHER_TEMPLATE = "other_template"
    LOW_ACCEPTANCE = "low_acceptance"
    """Too little is accepted, and nothing above explains it."""


ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """`where` is a file, or a file and a key or tensor in it. `mended`: the probe went on as if it had been mended."""

    code: Code
    where: str
    what: str
    mend: str
    severity: str = ERROR
    mended: bool = False
