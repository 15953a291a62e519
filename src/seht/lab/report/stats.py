"""Means over seeds, and paired differences: all the statistics a report contains.

A standard error is that of the mean, s / sqrt(n), as in the paper's tables. A difference is paired:
both runs of a pair share their seed, hence initial weights and data order, so what the seed does to
both alike drops out. Its interval is Student's, mean ± t s / sqrt(n) with n - 1 degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; ``value`` is NaN if one of them was not finite."""

    value: float
    error: float | None
    """Standard error; ``None`` for a single seed."""
    n: int


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its confidence interval (``None`` for a single pair)."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low is not None and self.high is not None and self.low * self.high > 0


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
    reach = student(n - 1) * error
    return Difference(centre, centre - reach, centre + reach, n)


def student(freedom: int) -> float:
    """The two-sided quantile of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2))


def _error(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))
