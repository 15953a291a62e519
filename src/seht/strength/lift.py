"""When the bound on a tuned weight is too low: the held-out loss rises, the training loss falls.

That is memorising in the strict sense, in spite of the penalty, and more of it is needed than the
usual bound allows: on small photographs with wrong labels three times as much, and without it the
labels were learnt. On digits the held-out loss never rose so far.

A penalty that is too strong lets the held-out loss rise, too, but not the training loss fall. So
the bound is lifted only while the training loss is near its minimum; and if the held-out loss gets
worse after that it was a mistake, and the usual bound holds for the rest of the training.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

_SETTLED = 10
"""The number of looks after which a running mean is taken for one."""
_CLEARLY = 0.05
"""The part of a loss by which another one is clearly above it."""


@dataclass(frozen=True)
class Lift:
    """The smallest running means so far, and what became of a lifted bound."""

    train: float = math.inf
    held_out: float = math.inf
    since: float = math.inf
    """The held-out loss when the bound was first lifted."""
    lifted: bool = False
    """Whether the bound is lifted now."""
    failed: bool = False
    """Whether lifting it did harm; then it is not tried again."""

    def after(self, looks: int, train: float, held_out: float) -> Lift:
        """The same with the running means after one more look."""
        if looks < _SETTLED:
            return self
        lowest = min(self.train, train), min(self.held_out, held_out)
        memorising = _above(held_out, lowest[1]) and not _above(train, lowest[0])
        since = held_out if memorising and self.since == math.inf else self.since
        failed = self.failed or (not memorising and _above(held_out, since))
        return Lift(*lowest, since, memorising and not failed, failed)

    def state(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


def _above(loss: float, other: float) -> bool:
    return loss - other > _CLEARLY * abs(other)
