r"""The rule of the tuned weight: the gradient of a held-out loss shows whether the penalty helps.

A step of the training changes the held-out loss by :math:`-\eta\lambda\, g_{val}^T P h`, where h is
the gradient of the trace and P the optimiser's preconditioner. So :math:`\log\lambda` rises where
:math:`\cos(g_{val}, h)` is positive and falls where it is negative: Adam's step on that cosine
(first-order hypergradients: Luketina et al., arXiv 1511.06727; Baydin et al., arXiv 1703.04782).

What trials added to that:

- one cosine is mostly noise (mean 0.03, standard deviation 0.12, with 60 held-out examples), so
  that a run has to begin near the right order of magnitude: at a *share* of the loss's gradient;
- for the same reason a start a hundred times too small was still forty times too small at the end:
  a start that is far off is led *home*, to the share that did well in trials, over the first looks;
- the weight has an upper bound: the cosine does not see what the noise of single steps does, and
  without a bound the weight ran away on clean data (the gradient *after* the step does see it, but
  not the later benefit of a smaller trace, and let the weight fall while it was needed);
- the cosine does not see whether anything is memorised: the weight waits until the held-out loss is
  above the training loss and has stopped falling, and grows gradually then; it shrinks where it
  does harm, and where the held-out loss rises in spite of it the bound is too low, and is lifted
  (:mod:`seht.strength.phase`);
- late looks count less, because fewer steps are left for the weight to act: without that, the
  weight fell at the end of the training and wrong labels were learnt after all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from seht.errors import check_count, check_positive
from seht.strength.phase import Phase

_FIRST, _SECOND = 0.9, 0.99
_FALLING = 0.5
"""How fast the weight falls, compared with how fast it rises: if it falls too early, wrong labels
are learnt, and that cannot be undone."""
_LOOKS = 150
"""A short training has looks more often, so that it gets this many."""
_STEPS = 8
"""In a long one this many steps lie between looks. A look is the held-out forward and backward pass
and one more backward pass of the trace, some 1.65 plain steps, so a fifth of one on average."""
FEW = 100
"""With fewer looks than this the weight moves less in all, as single looks are mostly noise. The
running means, which remember twenty, notice too late then what it does, so that what applies grows
slower, and there is a warning."""
_LEAD = 25
"""The number of looks over which a start is led home."""
_UNKNOWN = 0.05
"""The rate if the length of the training is unknown."""


@dataclass(frozen=True)
class Tuning:
    """Settings of ``weight="tuned"``; the defaults are those of the trials.

    A *look* computes the cosine between g, the gradient of the loss on a held-out batch, and h, the
    gradient of the trace. log(weight) rises with a positive cosine and falls with a negative one:
    then a step along −h lowers or raises the held-out loss (first-order hypergradients, arXiv
    1511.06727). A *share* is the norm of the penalty's averaged gradient over the loss's own.

    Cost: a look takes some 1.65 plain steps; in a long training every eighth step has one.

    Example:
        ```python
        penalty = seht.HessianTrace(
            model, weight=seht.Tuning(start=1.0), curvature="ggn", held_out=([batch], loss_fn)
        )
        ```

    Args:
        start: the share to begin with; at most ``most``.
        most: the largest share, as long as the held-out loss does not rise again.
        least: the smallest share.
        travel: how far log(weight) would move if all looks of the training agreed.
        interval: penalised steps between two looks; by default a look comes every eighth step, and
            more often in a training that is too short for 150 of them.
        home: the share to which a different start is led over the first 25 looks, in addition to
            what they say.
        gap: the weight may apply in full if the training loss is this fraction of the held-out loss
            below it; at half of this gap or less only a fiftieth of it does. From a fiftieth it
            grows by a half from look to look, once the held-out loss has stopped falling; 0 applies
            it from the start (:mod:`seht.strength.phase`).
        beyond: how many times ``most`` the share may become while the held-out loss rises and the
            training loss falls (:mod:`seht.strength.phase`); 1: never beyond ``most``.
    """

    start: float = 3.0
    most: float = 4.0
    least: float = 1e-3
    travel: float = 20.0
    interval: int | None = None
    home: float = 3.0
    gap: float = 0.2
    beyond: float = 4.0

    def __post_init__(self) -> None:
        for name in ("start", "most", "least", "travel", "home", "beyond"):
            check_positive(name, getattr(self, name))
        if self.gap != 0:
            check_positive("gap", self.gap)
        check_count("interval", self.interval, optional=True)
        if self.beyond < 1:
            raise ValueError(
                f"beyond must be 1 or more, not {self.beyond:g}; 1 keeps most= as it is"
            )
        if not self.least <= self.home <= self.most:
            raise ValueError(
                f"a tuned weight needs least <= home <= most, not {self.least:g}, "
                f"{self.home:g}, {self.most:g}"
            )

    def spacing(self, penalised: int | None, every: int) -> int:
        """How many penalised steps lie between two looks."""
        if self.interval is not None:
            return self.interval
        long = -(-_STEPS // every)
        return long if penalised is None else max(1, min(long, penalised // _LOOKS))

    def pace(self, looks: int | None) -> float:
        """How fast the part that applies may grow, in a training with so many looks: from a
        fiftieth to the whole in ten looks of 100, and in 21 of 45.
        """
        return 1.0 if looks is None else min(1.0, looks / FEW)

    def rate(self, looks: int | None, left: float) -> float:
        """How far one look may move log(weight), with this part of the training ``left``."""
        if looks is None:
            return _UNKNOWN
        # The mean of 2 * left over a training is 1.
        return 2 * left * self.travel / max(looks, FEW)


@dataclass(frozen=True)
class Position:
    """Where a tuned weight is: log(share) once it has been led home, and Adam's moments of the
    cosine.
    """

    log_share: float
    looks: int = 0
    first: float = 0.0
    second: float = 0.0

    def moved(self, cosine: float, rate: float, tuning: Tuning, phase: Phase) -> Position:
        """The position after one more look."""
        looks = self.looks + 1
        first = _FIRST * self.first + (1 - _FIRST) * cosine
        second = _SECOND * self.second + (1 - _SECOND) * cosine * cosine
        size = math.sqrt(second / (1 - _SECOND**looks))
        step = rate * first / (1 - _FIRST**looks) / size if size > 0 else 0.0
        step *= 1 if step > 0 else _FALLING
        top = math.log(tuning.most * (tuning.beyond if phase.lifted else 1))
        if not phase.harmed:  # a share that is beyond the bound by then stays: nothing jumps
            top = max(top, self.log_share)
        return Position(_bounded(self.log_share + step, tuning, top), looks, first, second)

    def share(self, tuning: Tuning) -> float:
        """The share now."""
        away = math.log(tuning.start / tuning.home) * max(0.0, 1 - self.looks / _LEAD)
        top = max(math.log(tuning.most), self.log_share)
        return math.exp(_bounded(self.log_share + away, tuning, top))


def _bounded(log_share: float, tuning: Tuning, top: float) -> float:
    return min(max(log_share, math.log(tuning.least)), top)
