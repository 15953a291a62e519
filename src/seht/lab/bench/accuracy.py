r"""How exact a penalty's gradient is, and how much it varies from draw to draw.

The *error* of a draw is :math:`\|g - g^*\| / \|g^*\|` with :math:`g^*` the gradient of the same
draw on a float64 copy of the model. The *variance* is :math:`E\|g - m\|^2 / \|m\|^2`, m the mean
over draws.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seht.lab.bench.cases import Problem
from seht.lab.bench.rows import BenchRow
from seht.lab.bench.runners import SHARP, Penalty, Runner


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The relative distance in the L2 norm."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@dataclass(frozen=True)
class Estimated:
    """A number and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Moments:
    """The first two moments of some draws of a gradient, in blocks: a jackknife leaves one out."""

    counts: Tensor
    sums: Tensor
    """One row for each block."""
    squares: Tensor
    """The sums of the squared norms."""

    @classmethod
    def of(cls, draws: Iterable[Tensor], blocks: int = 8) -> Moments:
        """Takes the draws one by one, and deals them out to the blocks in turn."""
        counts = torch.zeros(blocks, dtype=torch.float64)
        squares = torch.zeros(blocks, dtype=torch.float64)
        sums: Tensor | None = None
        for i, draw in enumerate(draws):
            wide = draw.double()
            if sums is None:
                sums = wide.new_zeros(blocks, len(wide))
            counts[i % blocks] += 1
            squares[i % blocks] += wide @ wide
            sums[i % blocks] += wide
        if sums is None or counts.sum() < 2:
            raise ValueError("a variance needs at least two draws")
        return cls(counts, sums, squares)

    @property
    def count(self) -> int:
        """How many draws."""
        return int(self.counts.sum())

    @property
    def mean(self) -> Tensor:
        """The mean gradient."""
        return self.sums.sum(0) / self.count

    @property
    def square(self) -> float:
        """The mean of the squared norms."""
        return float(self.squares.sum() / self.count)

    @property
    def variance(self) -> float:
        """An unbiased estimate of E |g - m|^2."""
        mean = self.mean
        return (self.square - float(mean @ mean)) * self.count / (self.count - 1)

    @property
    def squared_mean(self) -> float:
        """An unbiased estimate of |m|^2: the mean of n draws is off by variance / n."""
        mean = self.mean
        return float(mean @ mean) - self.variance / self.count

    def relative_variance(self) -> Estimated | None:
        """Variance over squared mean; ``None`` where so few draws do not show the mean."""
        return _jackknife([self], lambda part: part[0].variance / part[0].squared_mean)

    def relative_to(self, other: Moments, chance: float) -> Estimated | None:
        """The same for an estimator of which we hold only the draws that are not zero.

        ``chance`` is how often it draws anything. Its mean, hidden in its noise, is that
        of ``other``.
        """
        return _jackknife(
            [self, other], lambda part: chance * part[0].square / part[1].squared_mean - 1
        )

    def offset(self, other: Moments) -> float | None:
        """How far its mean is from another's, relative to that; ``None`` if that may be noise."""
        gap = self.mean - other.mean
        noise = self.variance / self.count + other.variance / other.count
        squared = float(gap @ gap) - noise
        if squared < noise or other.squared_mean <= 0:
            return None
        return float((squared / other.squared_mean) ** 0.5)

    def without(self, block: int) -> Moments:
        """All blocks but one."""
        kept = [b for b in range(len(self.counts)) if b != block]
        return Moments(self.counts[kept], self.sums[kept], self.squares[kept])


def _jackknife(
    moments: Sequence[Moments], value: Callable[[Sequence[Moments]], float]
) -> Estimated | None:
    """The value, with the error that leaving out one block after the other shows."""
    if moments[-1].squared_mean <= 0:
        return None
    whole = value(moments)
    blocks = len(moments[0].counts)
    if any(part.counts.min() < 1 for part in moments):
        return Estimated(whole, abs(whole))  # fewer draws than blocks say nothing of the error
    parts = [value([m.without(b) for m in moments]) for b in range(blocks)]
    error = ((blocks - 1) / blocks * sum((p - whole) ** 2 for p in parts)) ** 0.5
    # Where leaving out a block changes everything, the mean is not to be seen in so few draws.
    return None if min(parts) < -1 or error > 2 * abs(whole) else Estimated(whole, error)


class Errors:
    """Errors of several rows on one problem; the float64 truth is shared where rows share it."""

    def __init__(self, problem: Problem, draws: int) -> None:
        self._problem, self._draws = problem, draws
        self._exact = problem.double()
        self._truths: dict[tuple[Callable[..., Runner], int], Tensor] = {}

    def of(self, row: BenchRow) -> float | None:
        """The median over some draws, the engine at the step it found for itself."""
        if row.truth is None:
            return None
        runner = _ready(row.runner(self._problem, SHARP))
        truths = {draw: self._truth(row, draw) for draw in runner.drawn(self._draws)}
        # A small layer of which SEHT-D drew no entry has no gradient to be off from.
        errors = [relative_error(runner.gradient(d), t) for d, t in truths.items() if t.any()]
        return statistics.median(errors) if errors else None

    def _truth(self, row: BenchRow, draw: int) -> Tensor:
        assert row.truth is not None
        key = (row.truth, draw)
        if key not in self._truths:
            exact = row.truth(self._exact, SHARP)
            if isinstance(exact, Penalty):
                exact.steady()  # float64 starts with a good step
            self._truths[key] = exact.gradient(draw)
        return self._truths[key]


def draw_moments(
    row: BenchRow, problem: Problem, draws: int, seconds: float
) -> tuple[Moments, float]:
    """Moments over the draws that are not zero, and how often there are such.

    Stops after ``seconds``, but not before eight draws.
    """
    runner = _ready(row.runner(problem, SHARP))
    end = time.perf_counter() + seconds

    def gradients() -> Iterable[Tensor]:
        for i, draw in enumerate(runner.drawn(draws)):
            if i >= 8 and time.perf_counter() > end:
                break
            yield runner.gradient(draw)

    return Moments.of(gradients()), runner.chance


def _ready(runner: Runner) -> Runner:
    if isinstance(runner, Penalty):
        runner.settle()
    torch.manual_seed(0)
    return runner
