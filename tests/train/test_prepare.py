"""Around the loop: a store of another target is refused, and the teacher is the target's own output function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.errors import HeadwayError
from tests.conftest import save_tiny_target
from tests.train.conftest import Run
from train import prepare


def test_features_of_another_target_are_refused(run: Run, tmp_path: Path, tiny_tokenizer: Any):
    other = save_tiny_target(tmp_path / "other-target", tiny_tokenizer, seed=9)
    with pytest.raises(HeadwayError, match=r"collected from target .*tiny-target.* the recipe's is .*other-target"):
        run(f"--target={other}")
    assert not (tmp_path / "head").exists()


class CappedEnds:
    """Ends of a target whose output function is not a plain product (Gemma-2's soft cap)."""

    def __init__(self, cap: float | None) -> None:
        self.lm_head_weight, self.cap, self.widest = (
            torch.randn(30, 8, generator=torch.Generator().manual_seed(0)),
            cap,
            0,
        )

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        self.widest = max(self.widest, len(last))
        logits = last @ self.lm_head_weight.T
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@pytest.mark.parametrize("cap", [None, 20.0])
def test_the_teacher_is_the_targets_own_output_function(cap: float | None):
    ids_D, ends = torch.tensor([1, 4, 9, 20]), CappedEnds(cap)
    last_CH = 2 * torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    teacher = prepare.restricted_output(ends, ids_D, last_CH[:5])
    torch.testing.assert_close(teacher(last_CH), ends.logits(last_CH)[:, ids_D])
    ends.widest = 0
    teacher(last_CH)
    assert (ends.widest == 0) == (cap is None)  # a plain product multiplies the draft vocabulary's rows alone
