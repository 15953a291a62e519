r"""The rule of the tuned weight: a held-out batch says whether the penalty helps.

A step of the training changes the held-out loss by :math:`-\eta\lambda\, g_{val}^T P h`, where h is
the gradient of the trace and P what the optimiser multiplies by. So :math:`\log\lambda` rises where
:math:`\cos(g_{val}, h)` is positive and falls where it is negative: Adam's step on that cosine
(first-order hypergradients: Luketina et al., arXiv 1511.06727; Baydin et al., arXiv 1703.04782).

What trials added to that:

- one cosine is mostly noise (mean 0.03, standard deviation 0.12, with 60 held-out examples), so
  that a run has to begin near the right order of magnitude: at a *share* of the loss's gradient;
- for the same reason a start a hundred times too small was still forty times too small at the end:
  one that is far off is led *home*, to the share that trials support, over the first looks;
- the weight may not pass a multiple of that: the cosine does not see what the noise of single
  steps does, and without a bound it ran away on clean data (the gradient *after* the step sees it,
  but not what a smaller trace is good for later, and let the weight fall where it was needed);
- the cosine does not see whether anything is memorised: the weight waits until the held-out loss is
  above the training loss (:mod:`seht.strength.gap`);
- late looks count less, as the steps that they speak of do: where they did not, the weight fell at
  the end of the training and wrong labels were learnt after all.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

_FIRST, _SECOND = 0.9, 0.99
_FALLING = 0.5
"""How fast it falls, compared with how fast it rises: a weight that falls too early lets wrong
labels be learnt, and that is not undone."""
_LOOKS = 150
"""A short training is looked at more often, so that it has so many looks."""
_STEPS = 8
"""A long one each eighth step: a look is the held-out forward and backward pass and the trace's
backward pass once more, some 1.65 plain steps, a fifth of one on average."""
_FEW = 100
"""With fewer looks each would have to move too far: the weight then moves less in all."""
_LEAD = 25
"""Looks over which a start is led home."""
_UNKNOWN = 0.05
"""The rate where nobody knows how long the training is."""


@dataclass(frozen=True)
class Tuning:
    """How ``weight="tuned"`` finds its weight; the defaults are those of the trials.

    Cost: a look takes some 1.65 plain steps and comes each eighth step of a long training.

    Example:
        ```python
        penalty = seht.HessianTrace(
            model, weight=seht.Tuning(start=1.0), curvature="ggn", held_out=([batch], loss_fn)
        )
        ```

    Args:
        start: the share that the weight begins with: the penalty's averaged gradient over the
            loss's own; one above ``most`` is cut.
        most: the share that it may not pass.
        least: the share below which it does not fall.
        travel: how far log(weight) could go if every look of the training said the same.
        interval: looks at the held-out data each so many penalised steps; by default as often as an
            eighth of all steps allows, and more often in a training too short for 150 of those.
        home: the share that another start is led to over the first 25 looks, beside what they say.
        gap: how far the training loss must be below the held-out loss, as a part of that, for the
            whole weight; half of it is no gap, and leaves nothing of the weight. 0: the weight
            needs none (:mod:`seht.strength.gap`).
    """

    start: float = 3.0
    most: float = 4.0
    least: float = 1e-3
    travel: float = 20.0
    interval: int | None = None
    home: float = 3.0
    gap: float = 0.2

    def __post_init__(self) -> None:
        for name in ("start", "most", "least", "travel", "home", "gap"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, not {value!r}")
            if not (math.isfinite(value) and (value > 0 or (value == 0 and name == "gap"))):
                raise ValueError(f"{name} must be positive and finite, not {value!r}")
        if not self.least <= self.home <= self.most:
            raise ValueError(
                f"a tuned weight needs least <= home <= most, not {self.least:g}, "
                f"{self.home:g}, {self.most:g}"
            )
        if self.interval is not None and (
            isinstance(self.interval, bool)
            or not isinstance(self.interval, int)
            or self.interval < 1
        ):
            raise ValueError(f"interval must be a whole number of 1 or more, not {self.interval!r}")

    def spacing(self, penalised: int | None, every: int) -> int:
        """How many penalised steps lie between two looks."""
        if self.interval is not None:
            return self.interval
        long = -(-_STEPS // every)
        return long if penalised is None else max(1, min(long, penalised // _LOOKS))

    def rate(self, looks: int | None, left: float) -> float:
        """How far one look may move log(weight), with this part of the training ``left``."""
        if looks is None:
            return _UNKNOWN
        # The mean of 2 * left over a training is 1.
        return 2 * left * self.travel / max(looks, _FEW)


@dataclass(frozen=True)
class Position:
    """Where a tuned weight is: the logarithm of the share, when it was led home, and Adam's moments
    of the cosine.
    """

    log_share: float
    looks: int = 0
    first: float = 0.0
    second: float = 0.0

    def moved(self, cosine: float, rate: float, tuning: Tuning) -> Position:
        """One look further."""
        looks = self.looks + 1
        first = _FIRST * self.first + (1 - _FIRST) * cosine
        second = _SECOND * self.second + (1 - _SECOND) * cosine * cosine
        size = math.sqrt(second / (1 - _SECOND**looks))
        step = rate * first / (1 - _FIRST**looks) / size if size > 0 else 0.0
        step *= 1 if step > 0 else _FALLING
        return Position(_bounded(self.log_share + step, tuning), looks, first, second)

    def share(self, tuning: Tuning) -> float:
        """The share now."""
        away = math.log(tuning.start / tuning.home) * max(0.0, 1 - self.looks / _LEAD)
        return math.exp(_bounded(self.log_share + away, tuning))

    def state(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


def _bounded(log_share: float, tuning: Tuning) -> float:
    return min(max(log_share, math.log(tuning.least)), math.log(tuning.most))
