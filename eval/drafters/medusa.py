"""Medusa heads as a drafter (methods.md, section 3): each head's first choice as a chain, or a tree of the first few.

Shapes: B rows, K heads, R candidates of a head, D draft vocabulary, M nodes without the root, H hidden.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from eval.chooser import Chooser
from eval.drafters import Committed
from eval.sampling import Sampling
from eval.tree import DraftTree, TreeShape
from heads.checkpoint import MANIFEST
from heads.errors import HeadwayError, sha256_file
from heads.medusa import Embed, MedusaHead

TREE = "tree.json"  # in a head's folder, by eval/grow_tree.py


def read_tree(folder: str | Path) -> TreeShape:
    """The candidate tree saved beside a head. Raises HeadwayError where there is none, or one of another training."""
    path = Path(folder) / TREE
    remedy = f"run eval/grow_tree.py --head {folder}"
    if not path.is_file():
        raise HeadwayError(f"{path}: this head has no candidate tree yet; {remedy}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        shape = TreeShape.of([[int(rank) for rank in ranks] for ranks in content["paths"]])
        grown_for = content["head_manifest_sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise HeadwayError(f"{path}: not a candidate tree ({error!r}); {remedy}") from error
    if grown_for != sha256_file(Path(folder) / MANIFEST):
        raise HeadwayError(f"{path}: was grown for other weights than this head's; {remedy}")
    return shape


class MedusaDrafter:
    """Drafts up to K tokens from the state whose logits gave the root: head k proposes the token k + 1 after it."""

    name = "medusa"
    taps: tuple[int, ...] = ()

    def __init__(self, head: MedusaHead, draft_length: int | None = None, embed: Embed | None = None) -> None:
        """`draft_length` heads are used, all by default; `embed` is the target's embedding, for Hydra heads.

        Raises HeadwayError when the head has fewer heads, or needs an embedding and is given none.
        """
        if head.config.hydra and embed is None:
            raise HeadwayError("Hydra heads draft from the target's embedding; give it to the drafter")
        self.head, self.embed = head, embed
        self.most_drafts = self.depth = _heads_used(head, draft_length)

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Nothing to forget: `observe` replaces the state."""

    def observe(self, committed: Committed) -> None:
        """Keep the state that the next draft starts from."""
        self.state_BH = committed.final_BH()

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """A chain of `depth` tokens a row, or of `length`."""
        return DraftTree.chain(root_B, self.head.draft_ids(self.state_BH, root_B, self.embed, length or self.depth))


class MedusaTreeDrafter:
    """Drafts a static tree: the node at path (r0, r1, ...) holds candidate r_k of head k at each depth."""

    name = "medusa-tree"
    taps: tuple[int, ...] = ()

    def __init__(self, head: MedusaHead, shape: TreeShape, draft_length: int | None = None) -> None:
        """`draft_length` heads are used: deeper nodes are left out.

        Raises HeadwayError for a draft length, depth or candidate that the head does not have, and for Hydra heads,
        whose candidates differ from path to path.
        """
        if head.config.hydra:
            raise HeadwayError("Hydra heads draft a chain; a tree of shared candidates does not fit them")
        depth = _heads_used(head, draft_length)
        if shape.max_depth > head.config.num_heads or max(shape.ranks, default=0) >= head.config.output_size:
            raise HeadwayError(
                f"tree of depth {shape.max_depth} with candidate {max(shape.ranks, default=0)}: this checkpoint has "
                f"{head.config.num_heads} heads with {head.config.output_size} candidates"
            )
        self.head, self.shape = head, shape.cut(depth)
        self.most_drafts, self.depth = len(self.shape.paths), self.shape.max_depth
        device = head.lm_head.weight.device
        self._width, self._target_ids_D = max(self.shape.ranks) + 1, head.target_ids()
        self._depth_M = torch.tensor(self.shape.depths, device=device) - 1
        self._rank_M = torch.tensor(self.shape.ranks, device=device)

    def start(self, rows: int, chooser: Chooser, sampling: Sampling) -> None:
        """Nothing to forget: `observe` replaces the state."""

    def observe(self, committed: Committed) -> None:
        """Keep the state that the next draft starts from."""
        self.state_BH = committed.final_BH()

    def draft(self, sequences: list[list[int]], root_B: Tensor, length: int | None = None) -> DraftTree:
        """The tree, filled with each head's candidates; one top-k for all heads. `length` keeps its upper levels."""
        logits_BKD = self.head.draft_logits(self.state_BH)
        candidates_BKR = logits_BKD.topk(self._width).indices
        tokens_BM = self._target_ids_D[candidates_BKR[:, self._depth_M, self._rank_M]]
        shape = self.shape if length is None else self.shape.cut(length)
        return DraftTree.static(root_B, tokens_BM[:, : len(shape.paths)], shape)


def _heads_used(head: MedusaHead, draft_length: int | None) -> int:
    heads = head.config.num_heads
    used = heads if draft_length is None else draft_length
    if not 1 <= used <= heads:
        raise HeadwayError(f"draft length {draft_length}: this checkpoint has heads for 1 to {heads}")
    return used
