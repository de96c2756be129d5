"""What stops a run before a batch spoils it: a loss that is not finite, or far above the ones before. Shapes: P processes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

HISTORY = 101  # losses of the last steps that a spike is measured against
ENOUGH = 10  # of them, before anything is called a spike


class LossGuard:
    """Looks at the loss of a step while it adds up over forward passes, before each one's backward.

    `spike`: what multiple of the running median is refused; None = only what is not finite. `recent` goes into checkpoints, so
    that a resumed run stops where an uninterrupted one would.
    """

    def __init__(self, spike: float | None, recent: Iterable[float] = ()) -> None:
        self.spike = spike
        self._recent: deque[float] = deque(recent, maxlen=HISTORY)
        self._sum = 0.0

    @property
    def recent(self) -> list[float]:
        """Losses of the last steps, those without a supervised row left out."""
        return list(self._recent)

    def fault(self, losses_P: Sequence[float]) -> tuple[int, str] | None:
        """Take in what each process's pass adds to the step's loss: (the process at fault, what is wrong), or None."""
        for process, loss in enumerate(losses_P):
            if not math.isfinite(loss):
                return process, f"the loss is {loss}"
        self._sum += sum(losses_P)
        if self.spike is None or len(self._recent) < ENOUGH:
            return None
        usual = statistics.median(self._recent)
        if self._sum <= self.spike * usual:
            return None
        worst = max(range(len(losses_P)), key=losses_P.__getitem__)
        return (
            worst,
            f"the loss is {self._sum:.4g}, more than {self.spike:g} times the median {usual:.4g} of the last steps",
        )

    def done(self, supervised: bool) -> None:
        """The step is over; it was `supervised` when some row counted in its loss."""
        if supervised:
            self._recent.append(self._sum)
        self._sum = 0.0
