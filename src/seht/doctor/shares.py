r"""The share: the penalty's gradient over the loss's own, both averaged over probes and batches.

It is the ``share=`` of :class:`seht.HessianTrace`: a ratio of norms of averages, because one
probe's gradient is mostly noise. The error of such a norm comes from the scatter of independent
estimates of its square: the product of each new gradient with the average of those before it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from seht.doctor.curvatures import CurvatureChoice, gradients
from seht.doctor.patient import Patient
from seht.engines import make_engine
from seht.measure.results import PlainResult
from seht.probes import mix
from seht.strength.products import Vector, mean

PROBES = 8
"""As many as ``share=`` averages over."""
_FEWEST = 4
_ROUNDING = 1e-3
_INVARIANT = 1e-5
"""A smaller part of the loss's gradient is only rounding (as for biases of attention's keys)."""
_AROUND = 2
"""Powers of ten shown below and above the weight whose share is about 1."""


@dataclass(frozen=True)
class Shares(PlainResult):
    """The share that a weight has, in all and in each tensor."""

    unit: float | None
    """The weight whose share is 1; ``None`` where the penalty's gradient is zero."""
    error: float
    """The relative standard error of that weight, and so of each share."""
    weights: Mapping[float, float]
    """The share of each power of ten."""
    layers: Mapping[str, float]
    """By tensor: its share at the weight ``unit``; tensors without a gradient are left out."""
    trace: float
    trace_stderr: float
    """The mean of the estimates, and its standard error."""
    probes: int
    """How many estimates, each on a batch of its own where there are as many."""
    noise: float
    """How much of the penalty's averaged gradient, in square, is noise of the probes."""
    vanishes: bool
    """Whether trace and gradient are both zero within rounding and noise."""


class _Average:
    """A mean of gradients, and what is known of its norm."""

    def __init__(self) -> None:
        self.vector: Vector = {}
        self._count = 0
        self._products: list[float] = []

    def add(self, new: Vector) -> None:
        """One more gradient."""
        if self._count:
            self._products.append(_inner(self.vector, new))
        self._count += 1
        self.vector = mean(self.vector, new, 1 / self._count)

    @property
    def norm(self) -> float:
        """The norm of the mean."""
        return math.sqrt(_inner(self.vector, self.vector))

    @property
    def error(self) -> float:
        """The relative standard error of that norm; infinite where it is not known."""
        square = self.norm**2
        if len(self._products) < 2 or square == 0:
            return math.inf
        return self._scatter / (2 * square)

    @property
    def noise(self) -> float:
        """How much of its square is not common to the gradients that it is the mean of."""
        square = self.norm**2
        common = statistics.fmean(self._products)
        return min(max(1 - common / square, 0.0), 1.0) if square > 0 else 0.0

    @property
    def insignificant(self) -> bool:
        """Whether the norm is no larger than chance would make it."""
        return not statistics.fmean(self._products) > 2 * self._scatter

    @property
    def _scatter(self) -> float:
        return statistics.stdev(self._products) / math.sqrt(len(self._products))


def measure_shares(
    patient: Patient,
    choice: CurvatureChoice,
    engine: str,
    seed: int,
    end: float,
    tell: Callable[[int, int], None],
) -> Shares:
    """Average until all probes are drawn, or the time is over."""
    worker = make_engine(engine)
    loss, penalty = _Average(), _Average()
    traces: list[float] = []
    for k in range(PROBES):
        batch = patient.batches[k % len(patient.batches)]
        found = gradients(
            patient, worker, choice.curvature, choice.boundary, batch, mix(seed, k, 11)
        )
        traces.append(found[0])
        loss.add(found[1])
        penalty.add(found[2])
        tell(k + 1, PROBES)
        if len(traces) >= _FEWEST and time.perf_counter() > end:
            break
    # A gradient of the trace below this is only rounding.
    least = _ROUNDING * max(map(abs, traces)) / patient.objective.weight_norm
    unit = loss.norm / penalty.norm if penalty.norm > 0 and loss.norm > 0 else None
    weights: dict[float, float] = {}
    layers: dict[str, float] = {}
    if unit is not None:
        middle = round(math.log10(unit))
        powers = range(middle - _AROUND, middle + _AROUND + 1)
        weights = {float(f"1e{k}"): float(f"1e{k}") / unit for k in powers}
        for name, part in penalty.vector.items():
            own = float(loss.vector[name].norm()) if name in loss.vector else 0.0
            if own > _INVARIANT * loss.norm:
                layers[name] = unit * float(part.norm()) / own
    trace, stderr = statistics.fmean(traces), statistics.stdev(traces) / math.sqrt(len(traces))
    chance = penalty.insignificant and not abs(trace) > 2 * stderr
    return Shares(
        unit=unit,
        error=math.hypot(loss.error, penalty.error),
        weights=weights,
        layers=layers,
        trace=trace,
        trace_stderr=stderr,
        probes=len(traces),
        noise=penalty.noise,
        vanishes=chance or not penalty.norm > least,
    )


def _inner(a: Vector, b: Vector) -> float:
    return math.fsum(float((a[n].double() * b[n].double()).sum()) for n in a if n in b)
