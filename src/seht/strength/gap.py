"""The gap between held-out and training loss: without one there is nothing for a penalty to gain.

A penalty slows memorising down; if nothing is memorised, it can only harm. Every look computes both
losses, in the same mode. So the weight waits until the held-out loss is clearly above the training
loss, and shrinks again if the two meet.

What trials added to that:

- without a gap the looks do not count: they say nothing about the weight that is needed later.
  Counted, they had lowered it by then, and a quarter of the gain was lost (two runs);
- a gap of a few hundredths may come from the choice of held-out examples, which looks at the same
  ones cannot average out, so it does not count; from a larger gap the standard error of its mean is
  subtracted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from seht.strength.phase import LEAST

_MEMORY = 20
"""The number of looks that the running means remember."""
_WHOLE = 0.9
_SAME, _DIGITS = 3, 1e-6
"""So many looks without a difference, up to rounding, are no chance."""


@dataclass(frozen=True)
class Gap:
    """Running means of both losses, and of their squared difference."""

    looks: int = 0
    train: float = 0.0
    held_out: float = 0.0
    square: float = 0.0

    def after(self, train: float, held_out: float) -> Gap:
        """The means after one more look."""
        looks = self.looks + 1
        rate = max(1 / looks, 1 / _MEMORY)
        return Gap(
            looks,
            self.train + rate * (train - self.train),
            self.held_out + rate * (held_out - self.held_out),
            self.square + rate * ((held_out - train) ** 2 - self.square),
        )

    @property
    def same(self) -> bool:
        """Whether both were one number to the last digit, look by look: the same examples."""
        return self.looks >= _SAME and self.square <= (_DIGITS * self.held_out) ** 2 > 0

    @property
    def relative(self) -> float:
        """The gap less its standard error, as a fraction of the larger loss."""
        gap, size = self.held_out - self.train, max(abs(self.train), abs(self.held_out))
        counted = min(self.looks, _MEMORY)
        if counted < 2 or size == 0:
            return 0.0
        error = math.sqrt(max(self.square - gap * gap, 0.0) / (counted - 1))
        return (gap - error) / size

    def factor(self, gap: float) -> float:
        """The part of the weight that may apply: 1 from this ``gap`` on, least up to half of it."""
        return 1.0 if gap == 0 else min(1.0, max(LEAST, 2 * self.relative / gap - 1))

    def counts(self, gap: float) -> bool:
        """Whether a look may move the weight."""
        return self.factor(gap) >= _WHOLE
