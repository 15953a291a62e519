"""How much of a tuned weight applies: it grows from look to look, and goes where it does harm.

A network that is trained already, a pretrained one say, does not bear at once what one that is
trained from scratch does: applied in full on the first step with a gap, the penalty cost a
fine-tuned EfficientNet 33 points within ten steps, and eleven in the end. So the part that applies
grows gradually, up to what the gap allows (:mod:`seht.strength.gap`).

Whether it does harm, both losses say together. Memorising raises the held-out loss and lowers the
training loss; where both are clearly above their lowest, it is the penalty, and half of what was
applied is the most from then on, look after look until the training has recovered. For good: a
second try would cost as much again. A held-out loss that falls, from far above its lowest, is taken
for harm as well, which cost one of five trainings on photographs its gain; compared with its lowest
of late instead, harm ended too soon, and fine-tuning lost three points in place of one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

LEAST = 0.02
"""The smallest part of a weight; not 0, because a path needs positive weights."""
_GROWTH = 1.5
"""The factor by which the part may grow in one look: ten looks from the least to the whole."""
_SETTLED = 3
"""The number of looks after which a running mean is taken for one."""
_TRAIN, _HELD_OUT = 0.1, 0.05
"""The fractions by which a loss is clearly above its lowest."""


@dataclass(frozen=True)
class Onset:
    """The part that applies, the most that may, and the smallest running means so far."""

    part: float = LEAST
    most: float = 1.0
    train: float = math.inf
    held_out: float = math.inf

    def after(self, looks: int, train: float, held_out: float, allowed: float) -> Onset:
        """The same with the running means after one more look, where the gap allows so much."""
        if looks < _SETTLED:
            return self
        worse = _above(train, self.train, _TRAIN) and _above(held_out, self.held_out, _HELD_OUT)
        harm = worse and self.part > LEAST  # the least does none
        most = min(self.most, self.part / 2) if harm else self.most
        part = max(LEAST, min(allowed, most, _GROWTH * self.part))
        return Onset(part, most, min(self.train, train), min(self.held_out, held_out))

    def state(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


def _above(loss: float, lowest: float, part: float) -> bool:
    return loss - lowest > part * abs(lowest)
