"""How much of a tuned weight applies, by what both losses do: is anything memorised, does it harm?

Every look has the running means of both losses (:mod:`seht.strength.gap`), and there are four
things that they can say:

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

    def after(self, looks: int, train: float, held_out: float, allowed: float) -> Phase:
        """The same with the running means after one more look, where the gap allows so much."""
        if looks < _SETTLED:
            return self
        deeper = train <= self.train
        then = held_out if deeper else self.then
        waited = 0 if held_out < self.held_out else self.waited + 1
        lowest = min(self.train, train), min(self.held_out, held_out)
        less = _above(train, lowest[0], _TRAIN)
        harm = less and _above(held_out, then, _HELD_OUT) and self.part > LEAST
        most = min(self.most, self.part / 2) if harm else self.most
        growth = _GROWTH if waited >= _PATIENCE else 1.0
        part = max(LEAST, min(allowed, most, growth * self.part))
        lifted = most == 1 and not less and _above(held_out, lowest[1], _HELD_OUT)
        return Phase(part, most, *lowest, then, waited, lifted)


def _above(loss: float, other: float, part: float) -> bool:
    return loss - other > part * abs(other)
