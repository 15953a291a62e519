r"""The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

.. math:: \phi(\lambda) \approx \frac1K \sum_k \sum_j \tau_{kj}^2\, \delta(\lambda - \theta_{kj})

From a random start :math:`v_k` the Lanczos recurrence makes a tridiagonal matrix, with eigenvalues
:math:`\theta_{kj}` and first entries :math:`\tau_{kj}` of its eigenvectors. For drawing, each delta
becomes a Gaussian of width ``width``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from seht.errors import check_count, check_options, check_positive
from seht.measure.keep import unit_normal
from seht.measure.krylov import lanczos
from seht.measure.numbers import duration, number, said, with_error
from seht.measure.objective import CurvatureOptions, HessianProduct, measuring
from seht.measure.results import PlainResult
from seht.measure.stats import mean_error
from seht.task import LossFn


@dataclass(frozen=True)
class DensityResult(PlainResult):
    """Nodes and weights of each start vector, and the smoothed density with its error."""

    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    """Of the nodes, for each start vector; they add up to 1."""
    grid: tuple[float, ...]
    density: tuple[float, ...]
    """The density on the grid; its integral is 1."""
    stderr: tuple[float, ...]
    """Standard error of the density, over start vectors; nan with one."""
    width: float
    """The standard deviation of the Gaussians."""
    size: int
    """The number of weights, which is the number of eigenvalues."""
    trace: float
    """The trace by the same quadrature, to compare with :func:`seht.measure.trace`."""
    trace_stderr: float
    products: int
    samples: int
    seconds: float
    curvature: str = "hessian"

    def share(self, low: float, high: float) -> float:
        """The fraction of the eigenvalues between ``low`` and ``high``."""
        inside = [
            w
            for nodes, weights in zip(self.nodes, self.weights, strict=True)
            for node, w in zip(nodes, weights, strict=True)
            if low <= node <= high
        ]
        return sum(inside) / len(self.nodes)

    def __str__(self) -> str:
        """The ends, the trace, and which share of the eigenvalues is around zero."""
        kind = "G" if self.curvature == "ggn" else "H"
        low, high = min(map(min, self.nodes)), max(map(max, self.nodes))
        near = 0.01 * max(abs(low), abs(high))
        rows = [
            (f"spectrum of {kind}", ""),
            ("smallest node", number(low)),
            ("largest node", number(high)),
            ("eigenvalues below zero", f"{self.share(-math.inf, -near):.1%}"),
            ("... within 1 % of the largest", f"{self.share(-near, near):.1%}"),
            ("... above zero", f"{self.share(near, math.inf):.1%}"),
            (f"tr({kind}), by quadrature", with_error(self.trace, self.trace_stderr)),
        ]
        title = (
            f"density of {self.size:,} eigenvalues from {len(self.nodes)} starts on "
            f"{self.samples:,} samples, {self.products} products, {duration(self.seconds)}"
        )
        return said(title, rows)


def density(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    probes: int = 4,
    steps: int = 40,
    points: int = 400,
    width: float | None = None,
    **options: Unpack[CurvatureOptions],
) -> DensityResult:
    """The spectral density of the Hessian of the mean loss: where its eigenvalues lie.

    φ(λ) = 1/n Σ δ(λ − λᵢ), smoothed by Gaussians, by stochastic Lanczos quadrature (Ubaru, Chen and
    Saad, SIAM J. Matrix Anal. 38, 2017; Ghorbani, Krishnan and Xiao, arXiv 1901.10159).

    Cost: ``probes * steps`` Hessian-vector products over all the data, two gradients each, and the
    memory of ``steps`` vectors as long as the weights.

    Example:
        ```python
        found = seht.measure.density(model, loss_fn, batch, probes=2, steps=10)
        print(found.share(-0.01, 0.01))  # the fraction of eigenvalues that are about zero
        ```

    Args:
        model: as in :func:`seht.measure.trace`, and so are ``loss_fn`` and ``data``.
        loss_fn: the mean loss of a batch.
        data: the data to measure on.
        probes: the number of random start vectors; their spread gives the error.
        steps: steps of the Lanczos recurrence; more of them resolve finer detail.
        points: the number of points of the grid.
        width: the standard deviation of the Gaussians; 1 % of the range by default.
        options: ``curvature``, ``boundary``, ``seed`` (of the starts), ``progress``, ``params``,
            ``micro_batch``, ``batch_dim`` and ``limit``, as in :func:`seht.measure.trace`.
    """
    check_options(density, options, CurvatureOptions.__annotations__)
    check_count("probes", probes)
    check_count("steps", steps)
    check_count("points", points, 2)
    check_positive("width", width, optional=True)
    nodes, weights = [], []
    with measuring("density", model, loss_fn, data, **options) as m:
        product = HessianProduct(m)
        for k in range(probes):
            start = unit_normal(torch.Size([m.size]), m.seed, 13, k)
            found = lanczos(product, start, steps, lambda j: m.tell(k * steps + j, probes * steps))
            nodes.append(found[0])
            weights.append(found[1])
    grid, curves, width = _smooth(nodes, weights, points, width)
    mean, stderr = mean_error(curves)
    trace, trace_stderr = mean_error(
        [float((n * w).sum() * m.size) for n, w in zip(nodes, weights, strict=True)]
    )
    return DensityResult(
        nodes=tuple(tuple(n.tolist()) for n in nodes),
        weights=tuple(tuple(w.tolist()) for w in weights),
        grid=tuple(grid.tolist()),
        density=tuple(mean.tolist()),
        stderr=tuple(stderr.tolist()),
        width=width,
        size=m.size,
        trace=float(trace),
        trace_stderr=float(trace_stderr),
        products=product.count,
        samples=m.samples,
        seconds=m.seconds,
        curvature=m.objective.curvature,
    )


def _smooth(
    nodes: Sequence[Tensor], weights: Sequence[Tensor], points: int, width: float | None
) -> tuple[Tensor, Tensor, float]:
    low = min(float(n.min()) for n in nodes)
    high = max(float(n.max()) for n in nodes)
    span = high - low or max(abs(high), 1.0)
    width = 0.01 * span if width is None else width
    grid = torch.linspace(low - 4 * width, high + 4 * width, points, dtype=torch.float64)
    curves = []
    for n, w in zip(nodes, weights, strict=True):
        bumps = torch.exp(-((grid[:, None] - n) ** 2) / (2 * width**2))
        curves.append((bumps * w).sum(1) / (width * math.sqrt(2 * math.pi)))
    return grid, torch.stack(curves), width
