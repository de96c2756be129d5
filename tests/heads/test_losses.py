"""Losses by name against autograd over their formulas; what is held in memory at a time.

Shapes: P packed rows, R rows of a head, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads import divergences, losses
from heads.divergences import DIVERGENCES, best, check_losses
from heads.errors import HeadwayError
from heads.losses import Rows, draft_loss

P, H, D = 23, 8, 256
NAMES = sorted(DIVERGENCES)


def plain_loss(name: str, z_RD: Tensor, p_RD: Tensor, labels_R: Tensor) -> Tensor:
    """[R], as a textbook writes it."""
    q_RD = z_RD.softmax(-1)
    m_RD = (p_RD + q_RD) / 2
    top = p_RD >= p_RD.topk(divergences.TOP_TOKENS, -1).values[:, -1:]
    formulas: dict[str, Callable[[], Tensor]] = {
        "ce": lambda: F.cross_entropy(z_RD, labels_R, reduction="none"),
        "kl": lambda: (p_RD * (p_RD / q_RD).log()).sum(-1),
        "reverse_kl": lambda: (q_RD * (q_RD / p_RD).log()).sum(-1),
        "tv": lambda: (p_RD - q_RD).abs().sum(-1) / 2,
        "js": lambda: ((p_RD * (p_RD / m_RD).log()).sum(-1) + (q_RD * (q_RD / m_RD).log()).sum(-1)) / 2,
        "lk": lambda: -torch.minimum(p_RD, q_RD).sum(-1).log(),
        "top_k": lambda: -(top * p_RD * q_RD.log()).sum(-1),
    }
    return formulas[name]()


class Case:
    """Two heads' rows over one weight, with a teacher of other states."""

    def __init__(self, draft: int = D, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.weight_DH, self.last_PH, self.teacher_DH = random(draft, H), random(P, H), random(draft, H)
        self.weight_DH.requires_grad_(True)
        self.rows = []
        for count in (P - 1, 9):
            slots_R = torch.randperm(P, generator=generator)[:count].sort().values
            labels_R = torch.randint(draft, (count,), generator=generator)
            self.rows.append(Rows(random(count, H).requires_grad_(True), labels_R, slots_R))

    def teacher(self, last: Tensor) -> Tensor:
        return last @ self.teacher_DH.T

    def leaves(self) -> list[Tensor]:
        return [self.weight_DH, *(rows.x_RH for rows in self.rows)]

    def gradients(self, numerators_K: Tensor) -> list[Tensor]:
        scales = torch.tensor([0.7, -1.3])
        return list(torch.autograd.grad((numerators_K * scales).sum(), self.leaves(), allow_unused=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 5 * D, 2**24])
def test_each_loss_and_its_gradients_equal_autograd(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", chunk)
    case = Case()
    numerators_K, hits = draft_loss(case.rows, case.weight_DH, case.last_PH, case.teacher, {name: 1.0})
    found = case.gradients(numerators_K)
    sums = []
    for rows, hit_R in zip(case.rows, hits, strict=True):
        z_RD = rows.x_RH @ case.weight_DH.T
        p_RD = case.teacher(case.last_PH[rows.slots_R]).softmax(-1)
        sums.append(plain_loss(name, z_RD, p_RD, rows.labels_R).sum())
        assert torch.equal(hit_R, z_RD.argmax(-1) == rows.labels_R)
    expected = case.gradients(torch.stack(sums))
    torch.testing.assert_close(numerators_K.double(), torch.stack(sums), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixture", [{"ce": 0.4, "kl": 0.6}, {"tv": 0.5, "top_k": 2.0, "js": 1.5}])
def test_a_mixture_is_the_weighted_sum(mixture: dict[str, float]):
    case = Case(seed=1)

    def of(losses: dict[str, float]) -> list[Tensor]:
        numerators_K, _ = draft_loss(case.rows, case.weight_DH, case.last_PH, case.teacher, losses)
        return [numerators_K.detach(), *case.gradients(numerators_K)]

    parts = [[weight * tensor for tensor in of({name: 1.0})] for name, weight in mixture.items()]
    for whole, *shares in zip(of(mixture), *parts, strict=True):
        torch.testing.assert_close(whole, sum(shares), rtol=1e-5, atol=1e-5)


def test_through_a_frozen_function_the_states_get_its_gradient():
    """An output function that is no product (a soft cap) instead of a weight."""
    case = Case(seed=2)

    def capped(x: Tensor) -> Tensor:
        return 2 * torch.tanh(x @ case.weight_DH.detach().T / 2)

    numerators_K, _ = draft_loss(case.rows, capped, case.last_PH, case.teacher, {"kl": 1.0})
    found = case.gradients(numerators_K)
    assert found[0] is None
    sums = [
        plain_loss("kl", capped(rows.x_RH), case.teacher(case.last_PH[rows.slots_R]).softmax(-1), rows.labels_R).sum()
        for rows in case.rows
    ]
    for ours, theirs in zip(found[1:], case.gradients(torch.stack(sums))[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        values_K, _ = draft_loss(case.rows, capped, case.last_PH, case.teacher, {"kl": 1.0})
    torch.testing.assert_close(values_K, numerators_K.detach())


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that an operator made, weights of a given shape apart."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.elements = known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(size for size in sizes if size not in self.known)])
        return made


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_grows_with_the_rows_times_the_vocabulary(name: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever D is, nothing is larger than a chunk, but for the weight and its gradient."""
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 2048)
    for draft in (256, 1024):
        case = Case(draft)
        with Largest({draft * H, 2 * draft * H}) as largest:
            numerators_K, _ = draft_loss(case.rows, case.weight_DH, case.last_PH, case.teacher, {name: 1.0})
            numerators_K.sum().backward()
        assert 1024 <= largest.elements <= 2048, draft


def test_best_is_the_first_argmax():
    z = torch.randint(3, (200, 512), generator=torch.Generator().manual_seed(0)).float()
    assert best(z).tolist() == [row.index(max(row)) for row in z.tolist()]
    assert best(z[:, :100]).tolist() == [row.index(max(row)) for row in z[:, :100].tolist()]


def test_names_and_weights_are_checked():
    check_losses({"kl": 1.0, "smooth_l1": 1.0}, features=True)
    for bad, message in [
        ({"mse": 1.0}, "'mse' is unknown; known: ce, kl"),
        ({"smooth_l1": 1.0, "kl": 1.0}, "'smooth_l1' is unknown"),
        ({"kl": 0.0}, "head.losses.kl is 0.0"),
        ({}, "names no loss on the drafted law"),
    ]:
        with pytest.raises(HeadwayError, match=message):
            check_losses(bad)
    with pytest.raises(HeadwayError, match="names no loss on the drafted law"):
        check_losses({"smooth_l1": 1.0}, features=True)
    with pytest.raises(ValueError, match="give a teacher"):
        draft_loss(Case().rows, Case().weight_DH, Case().last_PH, None, {"kl": 1.0})
