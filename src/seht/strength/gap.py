"""Whether there is anything to gain: the held-out loss against the training loss, look by look.

A penalty slows memorising down, and where nothing is memorised it can only harm. Both losses are at
hand on every look, in the same mode. So the weight waits until the held-out loss is clearly above
the training loss, and goes again where the two meet.

What trials added to that:

- while there is no gap the looks say nothing of what the weight should be later: counted, they had
  lowered it by the time it was needed, and a quarter of the gain was lost (two runs);
- a gap of some hundredths may be the choice of the held-out examples, which no number of looks at
  the same ones averages out: it does not count, and of a larger one the error of the mean is taken
  off.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

_MEMORY = 20
"""Looks in the running means."""
_LEAST = 0.02
"""Not 0, so that a path can be gone again."""
_WHOLE = 0.9


@dataclass(frozen=True)
class Gap:
    """Running means of both losses, and of their squared difference."""

    looks: int = 0
    train: float = 0.0
    held_out: float = 0.0
    square: float = 0.0

    def after(self, train: float, held_out: float) -> Gap:
        """One look further."""
        looks = self.looks + 1
        rate = max(1 / looks, 1 / _MEMORY)
        return Gap(
            looks,
            self.train + rate * (train - self.train),
            self.held_out + rate * (held_out - self.held_out),
            self.square + rate * ((held_out - train) ** 2 - self.square),
        )

    @property
    def relative(self) -> float:
        """The part of the held-out loss that is not there on training data, less its own error."""
        gap, size = self.held_out - self.train, max(abs(self.train), abs(self.held_out))
        counted = min(self.looks, _MEMORY)
        if counted < 2 or size == 0:
            return 0.0
        error = math.sqrt(max(self.square - gap * gap, 0.0) / (counted - 1))
        return (gap - error) / size

    def factor(self, gap: float) -> float:
        """What the weight is multiplied by, where this gap is enough for the whole of it and half
        of it is none.
        """
        return 1.0 if gap == 0 else min(1.0, max(_LEAST, 2 * self.relative / gap - 1))

    def counts(self, gap: float) -> bool:
        """Whether what a look says of the weight is to be believed."""
        return self.factor(gap) >= _WHOLE

    def state(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)
