"""How much of a tuned weight applies, by what both losses do: is anything memorised, does it harm?

A penalty slows memorising down; if nothing is memorised, it can only harm. Every look computes both
losses, in the same mode, and the weight waits until the held-out loss is clearly above the training
loss (:class:`Gap`). Trials added to that:

- without a gap the looks do not count: they say nothing about the weight that is needed later.
  Counted, they had lowered it by then, and a quarter of the gain was lost (two runs);
- a gap of a few hundredths may come from the choice of held-out examples, which looks at the same
  ones cannot average out, so it does not count; from a larger gap the standard error of its mean is
  subtracted.

The running means of both losses can say four things (:class:`Phase`):

- **Learning**: the held-out loss still reaches new minima. Nothing grows then, however far the
  training loss is below it: a fine-tuned EfficientNet has its 400 images by heart after twenty
  steps, with a held-out loss that falls to the end, and a penalty only cost it accuracy.
- **Memorising**: no new minimum for some looks. The part that applies grows by a half from look to
  look, since no network bears all of it at once, up to what the gap allows. What has grown stays
  when the held-out loss falls again, because then the penalty is what makes it fall.
- **Memorising in spite of it**: the held-out loss is clearly above its minimum, the training loss
  at its own. More is needed than the usual bound allows (small photographs with wrong labels: three
  times as much), and the bound is lifted while that lasts.
- **Harm**: the training loss is clearly above its minimum, and the held-out loss clearly above what
  it was *then*, when most was memorised. A penalty that undoes memorising raises the training loss,
  too, but the held-out loss falls; compared with the minimum of the held-out loss, which it had
  before anything was memorised, that looked like harm. Half of what applied is the most from then
  on, look after look until the training has recovered, for good: a second try would cost as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY = 20
"""The number of looks that the running means remember."""
_WHOLE = 0.9
_SAME, _DIGITS = 3, 1e-6
"""So many looks without a difference, up to rounding, are no chance."""
LEAST = 0.02
"""The smallest part of a weight; not 0, because a path needs positive weights."""
_GROWTH = 1.5
"""The factor by which the part may grow in one look: ten looks from the least to the whole."""
_SETTLED = 10
"""The number of looks after which a running mean is taken for one."""
_PATIENCE = 10
"""So many looks without a new minimum of the held-out loss are no chance: half of what the running
means remember, and some rounds of the few batches that held-out examples make."""
_TRAIN, _HELD_OUT = 0.1, 0.05
"""The fractions by which a loss is clearly above another."""


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


@dataclass(frozen=True)
class Phase:
    """The part that applies, the most that may, and the smallest running means so far."""

    part: float = LEAST
    most: float = 1.0
    train: float = math.inf
    held_out: float = math.inf
    then: float = math.inf
    """The held-out loss when the training loss was smallest."""
    waited: int = 0
    """Looks since the held-out loss was smallest."""
    lifted: bool = False
    """Whether the bound on the weight is lifted now."""

    @property
    def harmed(self) -> bool:
        """Whether the penalty has done harm."""
        return self.most < 1

    def after(
        self, looks: int, train: float, held_out: float, allowed: float, pace: float = 1.0
    ) -> Phase:
        """The same with the running means after one more look, where the gap allows so much; at a
        ``pace`` of a half it takes twice the looks to grow as far.
        """
        if looks < _SETTLED:
            return self
        deeper = train <= self.train
        then = held_out if deeper else self.then
        waited = 0 if held_out < self.held_out else self.waited + 1
        lowest = min(self.train, train), min(self.held_out, held_out)
        less = _above(train, lowest[0], _TRAIN)
        harm = less and _above(held_out, then, _HELD_OUT) and self.part > LEAST
        most = min(self.most, self.part / 2) if harm else self.most
        growth = _GROWTH**pace if waited >= _PATIENCE else 1.0
        part = max(LEAST, min(allowed, most, growth * self.part))
        lifted = most == 1 and not less and _above(held_out, lowest[1], _HELD_OUT)
        return Phase(part, most, *lowest, then, waited, lifted)


def _above(loss: float, other: float, part: float) -> bool:
    return loss - other > part * abs(other)
