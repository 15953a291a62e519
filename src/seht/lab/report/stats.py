"""Means over seeds, and paired differences: all the statistics a report contains.

A standard error is that of the mean, s / sqrt(n), as in the paper's tables. A difference is paired:
both runs of a pair share their seed, hence initial weights and data order, so what the seed does to
both alike drops out. Its interval is Student's, mean ± t s / sqrt(n) with n - 1 degrees of freedom.
Of several differences some look large by chance: what is called better or worse has to pass Holm's
correction over all of them.

Accuracies come in steps of one test example, so that all differences of two or three seeds are
often equal to the last digit. Their spread is then unknown, not zero: there is no interval, and p
is that of the sign test.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from seht.measure.numbers import MINUS, number, with_error

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
"""The chance that a table without any effect calls a method better or worse."""
POWER = 0.8
MOST_SEEDS = 100_000


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; ``value`` is NaN if one of them was not finite."""

    value: float
    error: float | None
    """Standard error; ``None`` for a single seed."""
    n: int

    def __str__(self) -> str:
        """``97.31 ± 0.12``, with fixed places, as the paper writes accuracies and perplexities."""
        found = [self.value] if self.error is None else [self.value, self.error]
        return " ± ".join(map(_fixed, found))

    @property
    def measured(self) -> str:
        """``1,235 ± 57``: two digits of the error, and the value as far as those go."""
        if not math.isfinite(self.value):
            return "not finite"
        return with_error(self.value, self.error) if self.error else number(self.value)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its confidence interval.

    That is ``None`` where the spread is unknown: of a single pair, or of equal differences.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    p: float | None = None
    """The p of the two-sided paired t-test (of equal differences the sign test), not corrected."""
    spread: float | None = None
    """Standard deviation of the differences."""

    def __str__(self) -> str:
        """``+0.42 [−0.10, +0.94]``."""
        if self.low is None or self.high is None:
            return _fixed(self.value, "+")
        low, value, high = (_fixed(v, "+") for v in (self.low, self.value, self.high))
        return f"{value} [{low}, {high}]"


def _fixed(value: float, sign: str = "") -> str:
    return f"{value:{sign},.2f}".replace("-", MINUS) if math.isfinite(value) else "not finite"


def mean(values: Iterable[float]) -> Mean | None:
    """Mean and standard error; ``None`` of nothing."""
    found = list(values)
    if not found:
        return None
    if not all(map(math.isfinite, found)):
        return Mean(math.nan, None, len(found))
    return Mean(statistics.fmean(found), _error(found), len(found))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """``ours - theirs`` over the seeds that both have; ``None`` if there is none."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    n = len(differences)
    if not all(map(math.isfinite, differences)):
        return Difference(math.nan, None, None, n)
    centre, error = statistics.fmean(differences), _error(differences)
    if error is None:
        return Difference(centre, None, None, n)
    if centre and _equal(differences, [*ours.values(), *theirs.values()]):
        return Difference(centre, None, None, n, p=0.5 ** (n - 1))
    reach = student(n - 1) * error
    spread = statistics.stdev(differences)
    p = _p(centre, error, n - 1)
    return Difference(centre, centre - reach, centre + reach, n, p, spread)


def _equal(differences: list[float], values: list[float]) -> bool:
    """Whether they are all the same, but for the rounding of what was subtracted."""
    return max(differences) - min(differences) <= 1e-9 * max(map(abs, values))


def student(freedom: int, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))


def holm(found: Mapping[str, float]) -> dict[str, float]:
    r"""Each p corrected for all of them, in their order.

    Holm, Scandinavian Journal of Statistics 6 (1979): the k-th smallest of m becomes
    :math:`\max_{j \le k} \min(1, (m - j + 1)\, p_{(j)})`. Below the level, the chance of one
    mistake among all is below it too, however the tests depend on each other.
    """
    corrected, largest = {}, 0.0
    for done, name in enumerate(sorted(found, key=lambda name: found[name])):
        largest = max(largest, min(1.0, (len(found) - done) * found[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in found}


def seeds_needed(size: float, spread: float, tests: int = 1) -> int | None:
    """Seeds with which a paired difference of that size is called in four of five cases.

    Two-sided at :data:`LEVEL` over ``tests`` methods, by the first and strictest step of Holm's
    correction, for normal differences of this standard deviation; ``None`` above
    :data:`MOST_SEEDS`.
    """
    from scipy.special import nctdtr

    def power(n: int) -> float:
        bound, shift = student(n - 1, LEVEL / tests), size / spread * math.sqrt(n)
        # The other tail adds nothing where the power is of interest, and is not always computed.
        return 1 - float(nctdtr(n - 1, shift, bound))

    if not spread:
        return 2
    high = 2
    while power(high) < POWER:
        high *= 2
        if high > MOST_SEEDS:
            return None
    return bisect.bisect_left(range(high), POWER, lo=max(2, high // 2), key=power)


def _p(centre: float, error: float, freedom: int) -> float:
    """The chance of a mean at least so far from zero, without any effect."""
    from scipy.special import stdtr

    if not error:
        return 0.0 if centre else 1.0
    return 2 * float(stdtr(freedom, -abs(centre) / error))


def _error(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))
