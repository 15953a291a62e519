r"""How far an estimate may be off: replicates within micro-batches, and Student's t.

Micro-batch b of :math:`n_b` examples is probed by R independent replicates with mean :math:`m_b`
and variance :math:`s_b^2`. The estimate over the data and its variance *given the data* are

.. math:: T = \sum_b \frac{n_b}{N} m_b, \qquad v = \sum_b a_b, \quad
          a_b = \Big(\frac{n_b}{N}\Big)^2 \frac{s_b^2}{R} .

The spread between micro-batches is no error of T. The degrees of freedom are those of Welch and
Satterthwaite, :math:`(\sum a_b)^2 / \sum a_b^2 / \nu_b`, corrected for :math:`a_b` being estimated
themselves: :math:`E[a_b^2] = (1 + 2/\nu_b) E[a_b]^2`, which for two replicates is a factor of 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visit:
    """The replicates of one micro-batch in one reading of the data."""

    reading: int
    count: int
    """Its examples."""
    values: Tensor
    """float64, ``(replicates, quantities)``."""


@dataclass(frozen=True)
class Pooled:
    """Means over the data, one entry for each quantity."""

    mean: Tensor
    variance: Tensor
    """The variance of the mean over probes; nan if some micro-batch has only one replicate."""
    dofs: Tensor
    """Degrees of freedom of each variance (Satterthwaite's)."""

    @property
    def dof(self) -> float:
        """Those of the first quantity."""
        return float(self.dofs[0])


def pool(visits: Sequence[Visit]) -> Pooled:
    """Combine readings of the same data; each counts by its replicates."""
    readings = sorted({visit.reading for visit in visits})
    share = {
        k: sum(v.count * len(v.values) for v in visits if v.reading == k)
        / sum(v.count * len(v.values) for v in visits)
        for k in readings
    }
    size = {k: sum(v.count for v in visits if v.reading == k) for k in readings}
    mean = torch.zeros_like(visits[0].values[0])
    variance, squares, freedom = torch.zeros_like(mean), torch.zeros_like(mean), 0
    for visit in visits:
        weight = share[visit.reading] * visit.count / size[visit.reading]
        count = len(visit.values)
        mean += weight * visit.values.mean(0)
        part = weight**2 * visit.values.var(0) / count if count > 1 else mean * math.nan
        variance += part
        squares += part**2 / (count + 1)
        freedom += count - 1
    least = min(len(visit.values) for visit in visits) - 1
    known = squares > 0
    dofs = torch.where(known, variance**2 / torch.where(known, squares, 1) - 2, float(freedom))
    return Pooled(mean, variance, dofs.clamp(min(least, freedom), freedom))


def sampling_error(visits: Sequence[Visit]) -> float:
    """How far the part of the data that was read may be from the whole: a standard error.

    From the spread between the micro-batches of the first reading, without what the probes put into
    it; the micro-batches are taken for a random choice. nan where only one was read.
    """
    first = [visit for visit in visits if visit.reading == visits[0].reading]
    if len(first) < 2 or any(len(visit.values) < 2 for visit in first):
        return math.nan
    counts = torch.tensor([float(visit.count) for visit in first], dtype=torch.float64)
    means = torch.stack([visit.values[:, 0].mean() for visit in first])
    probes = torch.stack([visit.values[:, 0].var() / len(visit.values) for visit in first])
    share = counts / counts.sum()
    spread = (share * (means - (share * means).sum())).square().sum() * len(first)
    own = (share.square() * probes).sum()
    return math.sqrt(max(0.0, float(spread / (len(first) - 1) - own)))


def mean_error(
    values: Tensor | Sequence[float] | Sequence[Sequence[float]],
) -> tuple[Tensor, Tensor]:
    """The mean of independent values (rows), and its standard error; nan of a single one."""
    found = torch.as_tensor(values, dtype=torch.float64)
    mean = found.mean(0)
    return mean, found.std(0) / math.sqrt(len(found)) if len(found) > 1 else mean * math.nan


def student(level: float, dof: float) -> float:
    r"""The t with :math:`P(|T| \le t)` = level for T of Student's distribution.

    With :math:`t = \sqrt\nu \tan\theta` the density is :math:`\cos^{\nu-1}\theta`, up to its norm
    :math:`\sqrt\pi\,\Gamma(\nu/2) / \Gamma((\nu+1)/2)`, and is integrated by Simpson's rule.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level!r}")
    if not dof >= 1:
        return math.nan
    norm = math.sqrt(math.pi) * math.exp(math.lgamma(dof / 2) - math.lgamma((dof + 1) / 2))
    root, steps = math.sqrt(dof), 400

    def inside(angle: float) -> float:
        values = [math.cos(angle * i / steps) ** (dof - 1) for i in range(steps + 1)]
        inner = 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        return 2 * (values[0] + inner + values[-1]) * angle / steps / 3 / norm

    # Newton's method from the left of a root of a concave function: it never goes past it.
    t = 0.0
    for _ in range(100):
        angle = math.atan(t / root)
        step = (level - inside(angle)) * norm * root / 2 / math.cos(angle) ** (dof + 1)
        t += step
        if abs(step) <= 1e-10 * t:
            break
    return t
