"""The narrow attention against one mask over the keys of all steps, gradients too.

Shapes as in heads/narrow_attention.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads import narrow_attention as module
from heads.narrow_attention import Block, cut_blocks, narrow_attention

LENGTHS, A, G, E = [5, 1, 9, 3], 6, 2, 4
STARTS = [0, 5, 6, 15]
ASKING = [1, 2, 4, 6, 7, 8, 9, 12, 14, 17]


def made(own: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(own)
    shapes = [(len(ASKING), A, E), (18, G, E), (18, G, E), (len(ASKING), own, G, E), (len(ASKING), own, G, E)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def full_mask(q_RAE: Tensor, k_XGE: Tensor, v_XGE: Tensor, own_k_RJGE: Tensor, own_v_RJGE: Tensor) -> Tensor:
    """Every row over all tokens' keys and all rows' own ones, most of them hidden."""
    own = own_k_RJGE.shape[1]
    text_X = torch.tensor([number for number, length in enumerate(LENGTHS) for _ in range(length)])
    index_R = torch.tensor(ASKING)
    seen_RX = (text_X[index_R, None] == text_X) & (torch.arange(18) <= index_R[:, None])
    mask = torch.cat([seen_RX, *[torch.eye(len(ASKING), dtype=torch.bool)] * own], 1)
    keys = torch.cat([k_XGE, *own_k_RJGE.unbind(1)]).repeat_interleave(A // G, 1)
    values = torch.cat([v_XGE, *own_v_RJGE.unbind(1)]).repeat_interleave(A // G, 1)
    scores = torch.einsum("rae,qae->arq", q_RAE, keys) / E**0.5
    return torch.einsum("arq,qae->rae", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("block", [1, 3, 256])
def test_output_and_gradients_equal_a_full_mask(own: int, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BLOCK", block)
    tensors, index_R = made(own), torch.tensor(ASKING)
    out = narrow_attention(*tensors, index_R, cut_blocks(ASKING, STARTS))
    expected = full_mask(*tensors)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = torch.autograd.grad((out * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), tensors, allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_blocks_are_rows_of_one_text_and_see_no_key_past_their_last_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BLOCK", 3)
    assert cut_blocks(ASKING, STARTS) == [
        Block(0, 3, 0, 5),
        Block(3, 6, 6, 9),
        Block(6, 9, 6, 15),
        Block(9, 10, 15, 18),
    ]
    assert cut_blocks([], STARTS) == cut_blocks([], []) == []


def test_large_scores_do_not_overflow():
    tensors = [tensor.float() * 1e3 for tensor in made(2)]
    out = narrow_attention(*tensors, torch.tensor(ASKING), cut_blocks(ASKING, STARTS))
    torch.testing.assert_close(out, full_mask(*tensors))
