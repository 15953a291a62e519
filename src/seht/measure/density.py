r"""The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

.. math:: \phi(\lambda) = \frac1n \sum_i \delta(\lambda - \lambda_i)
          \approx \frac1K \sum_k \sum_j \tau_{kj}^2\, \delta(\lambda - \theta_{kj})

For each random start :math:`v_k` the Lanczos recurrence gives a tridiagonal matrix, whose
eigenvalues :math:`\theta_{kj}` are the nodes and the squared first entries of whose eigenvectors,
:math:`\tau_{kj}^2`, the weights of a Gauss quadrature of :math:`v_k^T f(H) v_k`. Every new vector
is orthogonalised against all before it, twice: without that rounding makes copies of large
eigenvalues. For drawing, each delta becomes a Gaussian of width ``width``.

Ubaru, Chen and Saad, SIAM J. Matrix Anal. 38 (2017); Ghorbani, Krishnan and Xiao, arXiv 1901.10159.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seht import probes as draw
from seht.measure.data import check_count
from seht.measure.keep import unit_normal
from seht.measure.krylov import Krylov
from seht.measure.numbers import duration, number, said, with_error
from seht.measure.problem import LossFn, measuring
from seht.measure.product import Product
from seht.measure.progress import Report, Reporter
from seht.measure.results import plain


@dataclass(frozen=True)
class DensityResult:
    """Nodes and weights of each start, and the smoothed density with its error over starts."""

    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    """For each start; they add up to 1."""
    grid: tuple[float, ...]
    density: tuple[float, ...]
    """On the grid; its integral is 1."""
    stderr: tuple[float, ...]
    """Of the density, over starts; nan with one."""
    width: float
    """Of the Gaussians."""
    size: int
    """The number of weights, so of eigenvalues."""
    trace: float
    """What the quadrature says of it: a check on :func:`seht.measure.trace`."""
    trace_stderr: float
    products: int
    samples: int
    seconds: float
    curvature: str = "hessian"

    def share(self, low: float, high: float) -> float:
        """Which part of the eigenvalues lies between the two."""
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

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plain(vars(self))


def density(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    probes: int = 4,
    steps: int = 40,
    points: int = 400,
    width: float | None = None,
    curvature: str = "hessian",
    seed: int = 0,
    progress: Report = None,
    params: draw.ParamSpec = None,
    boundary: str | None = None,
    micro_batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | None = None,
) -> DensityResult:
    """The spectral density of the Hessian of the data's mean loss.

    Costs ``probes * steps`` products, each of which reads all the data, and holds ``steps`` vectors
    of the size of the weights.

    Args:
        model: as in :func:`seht.measure.trace`, and so are the arguments that are not named here.
        loss_fn: the mean loss of a batch.
        data: what it is measured on.
        probes: random starts, whose spread is the error.
        steps: of the Lanczos recurrence: more resolve finer detail.
        points: of the grid.
        width: of the Gaussians on the grid; 1 % of the range by default.
        curvature: ``"hessian"``, or ``"ggn"``.
        seed: of the starts.
        progress: as in :func:`seht.measure.trace`.
        params: which tensors.
        boundary: for ``"ggn"``, the module whose outputs are the network's.
        micro_batch: cut batches into so many examples.
        batch_dim: the examples' axis.
        limit: read so many examples and no more.
    """
    check_count("probes", probes, optional=False)
    check_count("steps", steps, optional=False)
    check_count("points", points, 2, optional=False)
    if width is not None and not (math.isfinite(width) and width > 0):
        raise ValueError(f"width must be a positive number, not {width!r}")
    reporter = Reporter(progress, "density")
    nodes, weights = [], []
    with measuring(
        model, loss_fn, data, params=params, curvature=curvature, boundary=boundary,
        micro_batch=micro_batch, batch_dim=batch_dim, limit=limit, seed=seed,
    ) as (problem, batches):  # fmt: skip
        product = Product(problem, batches)
        try:
            for k in range(probes):
                start = unit_normal(torch.Size([product.size]), seed, 13, k)
                found = lanczos(
                    product, start, steps, lambda j: reporter(k * steps + j, probes * steps)
                )
                nodes.append(found[0])
                weights.append(found[1])
        finally:
            reporter.close()
    grid, curves, width = _smooth(nodes, weights, points, width)
    traces = torch.stack(
        [(n * w).sum() * product.size for n, w in zip(nodes, weights, strict=True)]
    )
    return DensityResult(
        nodes=tuple(tuple(n.tolist()) for n in nodes),
        weights=tuple(tuple(w.tolist()) for w in weights),
        grid=tuple(grid.tolist()),
        density=tuple(curves.mean(0).tolist()),
        stderr=tuple(_stderr(curves).tolist()),
        width=width,
        size=product.size,
        trace=float(traces.mean()),
        trace_stderr=float(_stderr(traces)),
        products=product.count,
        samples=product.samples,
        seconds=reporter.seconds,
        curvature=curvature,
    )


def lanczos(
    product: Any, start: Tensor, steps: int, tell: Any = lambda step: None
) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss quadrature that a start vector sees."""
    krylov = Krylov(product, start)
    while len(krylov) < steps and not krylov.closed:
        krylov.grow()
        tell(len(krylov))
    values, vectors, _ = krylov.ritz()
    return values, vectors[0].square()


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


def _stderr(values: Tensor) -> Tensor:
    if len(values) < 2:
        return values[0] * math.nan
    return values.std(0) / math.sqrt(len(values))
