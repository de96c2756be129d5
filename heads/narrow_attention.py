"""Attention of the training-time test (methods.md, section 4): a text's keys, and a few that belong to one row alone.

At step j a row attends to the step-0 keys of its text up to its own row, and to its own keys of steps 1 to j: T + j scores, where
a mask over all steps' keys would take (j + 1) T. Nothing of that size is kept: the backward pass makes the scores again.

Shapes: X tokens of all texts, one text behind the other; R rows that ask; C rows of a block; T keys of a block; J own keys of a
row; A attention heads, G key-value heads, M heads of a group (A = G * M), E head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # rows that ask at a time


class Block(NamedTuple):
    """Rows `start` to `stop` of those that ask, all of one text, and the keys `first` to `last` that they may see at most."""

    start: int
    stop: int
    first: int
    last: int


def cut_blocks(index_R: list[int], starts: list[int]) -> list[Block]:
    """Blocks of at most BLOCK rows of one text; `index_R`: the asking rows as ascending tokens, `starts`: first tokens of texts."""
    blocks: list[Block] = []
    text, begun = -1, 0
    bounds = [*starts[1:], float("inf")]
    for row, token in enumerate(index_R):
        moved = text < 0 or token >= bounds[text]
        if moved or row - begun == BLOCK:
            if row > begun:
                blocks.append(Block(begun, row, starts[text], index_R[row - 1] + 1))
            begun = row
        while moved and (text < 0 or token >= bounds[text]):
            text += 1
    if index_R:
        blocks.append(Block(begun, len(index_R), starts[text], index_R[-1] + 1))
    return blocks


def narrow_attention(
    q_RAE: Tensor,
    k_XGE: Tensor,
    v_XGE: Tensor,
    own_k_RJGE: Tensor,
    own_v_RJGE: Tensor,
    index_R: Tensor,
    blocks: list[Block],
) -> Tensor:
    """[R, A, E]: row r, which is token `index_R[r]`, attends to its text's keys up to that token and to all its own keys.

    Scores are scaled by 1 / sqrt(E); the blocks must cover every row (`cut_blocks`).
    """
    out_RAE: Tensor = _NarrowAttention.apply(q_RAE, k_XGE, v_XGE, own_k_RJGE, own_v_RJGE, index_R, blocks)
    return out_RAE


class _NarrowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_RAE: Tensor,
        k_XGE: Tensor,
        v_XGE: Tensor,
        own_k_RJGE: Tensor,
        own_v_RJGE: Tensor,
        index_R: Tensor,
        blocks: list[Block],
    ) -> Tensor:
        asking, heads, size = q_RAE.shape
        groups = k_XGE.shape[1]
        q_RGME = q_RAE.view(asking, groups, heads // groups, size)
        out_RGME = torch.empty_like(q_RGME)
        log_z_RGM = q_RGME.new_empty(q_RGME.shape[:-1], dtype=torch.float32)
        for block in blocks:
            part = _Part(block, q_RGME, k_XGE, v_XGE, own_k_RJGE, own_v_RJGE, index_R)
            rows, (scores_GXT, own_GMCJ) = slice(block.start, block.stop), part.scores()
            highest_GMC = part.split(scores_GXT).amax(-1)
            if own_GMCJ.shape[-1]:
                highest_GMC = torch.maximum(highest_GMC, own_GMCJ.amax(-1))
            weights_GXT, own_weights_GMCJ = part.laws(scores_GXT, own_GMCJ, highest_GMC)
            z_CGM = (part.split(weights_GXT).sum(-1) + own_weights_GMCJ.sum(-1)).permute(2, 0, 1)
            out_RGME[rows] = part.values(weights_GXT, own_weights_GMCJ) / z_CGM.unsqueeze(-1)
            log_z_RGM[rows] = highest_GMC.permute(2, 0, 1) + z_CGM.log()
        ctx.save_for_backward(q_RGME, k_XGE, v_XGE, own_k_RJGE, own_v_RJGE, index_R, log_z_RGM)
        ctx.blocks = blocks
        return out_RGME.view(asking, heads, size)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_RGME, k_XGE, v_XGE, own_k_RJGE, own_v_RJGE, index_R, log_z_RGM = ctx.saved_tensors
        grad_RGME = grads[0].reshape(q_RGME.shape)
        into = [torch.zeros_like(t) for t in (q_RGME, k_XGE, v_XGE, own_k_RJGE, own_v_RJGE)]
        for block in ctx.blocks:
            rows = slice(block.start, block.stop)
            part = _Part(block, q_RGME, k_XGE, v_XGE, own_k_RJGE, own_v_RJGE, index_R)
            laws = part.laws(*part.scores(), log_z_RGM[rows].permute(1, 2, 0))
            part.backward(*laws, grad_RGME[rows], into)
        into[0] = into[0].view(grads[0].shape)
        return *into, None, None


class _Part:
    """One block's share of the tensors; X here are the C rows of each of a group's M heads, one head behind the other."""

    def __init__(
        self,
        block: Block,
        q_RGME: Tensor,
        k_XGE: Tensor,
        v_XGE: Tensor,
        own_k_RJGE: Tensor,
        own_v_RJGE: Tensor,
        index_R: Tensor,
    ) -> None:
        self.rows, self.keys = slice(block.start, block.stop), slice(block.first, block.last)
        self.q_CGME, self.size = q_RGME[self.rows], block.stop - block.start
        self.q_GXE = self.stack(self.q_CGME)
        self.k_GTE, self.v_GTE = (part[self.keys].transpose(0, 1) for part in (k_XGE, v_XGE))
        self.own_k_CJGE, self.own_v_CJGE = own_k_RJGE[self.rows], own_v_RJGE[self.rows]
        self.scale = q_RGME.shape[-1] ** -0.5
        tokens_T = torch.arange(block.first, block.last, device=index_R.device)
        self.unseen_CT = tokens_T > index_R[self.rows].unsqueeze(1)

    def stack(self, part_CGME: Tensor) -> Tensor:
        """[C, G, M, E] -> [G, M * C, E]."""
        return part_CGME.permute(1, 2, 0, 3).flatten(1, 2)

    def unstack(self, part_GXE: Tensor) -> Tensor:
        """[G, M * C, E] -> [C, G, M, E]."""
        return self.split(part_GXE).permute(2, 0, 1, 3)

    def split(self, part_GXT: Tensor) -> Tensor:
        """[G, M * C, T] -> [G, M, C, T]."""
        return part_GXT.unflatten(1, (-1, self.size))

    def scores(self) -> tuple[Tensor, Tensor]:
        """Of the text's keys [G, M * C, T], hidden ones at -inf, and of the rows' own [G, M, C, J]; in float32."""
        scores_GXT = torch.bmm(self.q_GXE, self.k_GTE.transpose(1, 2)).float().mul_(self.scale)
        self.split(scores_GXT).masked_fill_(self.unseen_CT, -torch.inf)
        own_GMCJ = torch.einsum("cgme,cjge->gmcj", self.q_CGME, self.own_k_CJGE).float() * self.scale
        return scores_GXT, own_GMCJ

    def laws(self, scores_GXT: Tensor, own_GMCJ: Tensor, log_z_GMC: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (used up) -> probabilities, or multiples of them where `log_z` is another number than that."""
        log_z_GMC1 = log_z_GMC.unsqueeze(-1)
        self.split(scores_GXT).sub_(log_z_GMC1)
        return scores_GXT.exp_(), (own_GMCJ - log_z_GMC1).exp_()

    def values(self, law_GXT: Tensor, own_law_GMCJ: Tensor) -> Tensor:
        """[C, G, M, E]: the values under the laws."""
        dtype = self.v_GTE.dtype
        from_text_CGME = self.unstack(torch.bmm(law_GXT.to(dtype), self.v_GTE))
        return from_text_CGME + torch.einsum("gmcj,cjge->cgme", own_law_GMCJ.to(dtype), self.own_v_CJGE)

    def backward(self, law_GXT: Tensor, own_law_GMCJ: Tensor, grad_CGME: Tensor, into: list[Tensor]) -> None:
        """Add this block's gradients to those of (q, k, v, own k, own v)."""
        grad_q_RGME, grad_k_XGE, grad_v_XGE, grad_own_k_RJGE, grad_own_v_RJGE = into
        dtype, grad_GXE = self.v_GTE.dtype, self.stack(grad_CGME)
        grad_v_XGE[self.keys] += torch.bmm(law_GXT.to(dtype).transpose(1, 2), grad_GXE).transpose(0, 1)
        grad_own_v_RJGE[self.rows] = torch.einsum("gmcj,cgme->cjge", own_law_GMCJ.to(dtype), grad_CGME)
        # d loss / d score = law * (what the value adds to the loss - what a row's values add under its law); the latter from
        # the very same rounded products, or a row's errors would not add up to 0 in bf16
        error_GXT = torch.bmm(grad_GXE, self.v_GTE.transpose(1, 2)).float()
        own_error_GMCJ = torch.einsum("cgme,cjge->gmcj", grad_CGME, self.own_v_CJGE).float()
        level_GMC = self.split(torch.linalg.vecdot(law_GXT, error_GXT).unsqueeze(-1)).squeeze(-1)
        level_GMC1 = (level_GMC + torch.linalg.vecdot(own_law_GMCJ, own_error_GMCJ)).unsqueeze(-1)
        self.split(error_GXT).sub_(level_GMC1)
        error_GXT = error_GXT.mul_(law_GXT).mul_(self.scale).to(dtype)
        own_error_GMCJ = ((own_error_GMCJ - level_GMC1) * own_law_GMCJ * self.scale).to(dtype)
        grad_k_XGE[self.keys] += torch.bmm(error_GXT.transpose(1, 2), self.q_GXE).transpose(0, 1)
        grad_own_k_RJGE[self.rows] = torch.einsum("gmcj,cgme->cjge", own_error_GMCJ, self.q_CGME)
        from_text_CGME = self.unstack(torch.bmm(error_GXT, self.k_GTE))
        grad_q_RGME[self.rows] = from_text_CGME + torch.einsum("gmcj,cjge->cgme", own_error_GMCJ, self.own_k_CJGE)
