r"""The loss landscape around a model: filter-normalised slices in one or two random directions.

.. math:: f(\alpha) = L(w + \alpha d), \qquad f(\alpha, \beta) = L(w + \alpha d_1 + \beta d_2)

Each filter of a direction (a row of a weight's first axis) is scaled to the norm of the model's own
filter, :math:`d_f \leftarrow d_f \lVert w_f \rVert / \lVert d_f \rVert`, so that models of
different scale can be compared. Biases and norm scales stay where they are.

Li, Xu, Taylor, Studer and Goldstein, arXiv 1712.09913.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seht import probes as draw
from seht.measure.data import Batches, check_count
from seht.measure.keep import unit_normal
from seht.measure.numbers import duration, number, said, with_error
from seht.measure.problem import LossFn, Problem, measuring
from seht.measure.progress import Report, Reporter
from seht.measure.results import plain
from seht.replay.weights import Weights
from seht.tensors.interrupts import uninterrupted


@dataclass(frozen=True)
class LandscapeResult:
    """Losses on a grid of relative weight changes."""

    dims: int
    steps: tuple[float, ...]
    """The values of alpha (and beta): 1 moves each filter by its own norm."""
    losses: tuple[tuple[float, ...], ...]
    """One dimension: a row for each direction; two: a row for each beta. May be infinite."""
    centre: float
    """The loss of the model itself."""
    samples: int
    seconds: float

    @property
    def mean(self) -> tuple[float, ...]:
        """One dimension: the mean over directions at each step."""
        return tuple(torch.tensor(self.losses, dtype=torch.float64).mean(0).tolist())

    @property
    def stderr(self) -> tuple[float, ...]:
        """One dimension: its standard error over directions; nan with one of them."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        if self.dims == 2 or len(losses) < 2:
            return (math.nan,) * len(self.steps)
        return tuple((losses.std(0) / math.sqrt(len(losses))).tolist())

    def __str__(self) -> str:
        """A table of the losses; of a plane the rows are beta, the columns alpha."""
        title = (
            f"loss {number(self.centre)} on {self.samples:,} samples, and where every filter is "
            f"moved by so many times its norm, {duration(self.seconds)}"
        )
        if self.dims == 2:
            rows = [["beta, alpha", *(number(step, 2) for step in self.steps)]]
            for step, row in zip(self.steps, self.losses, strict=True):
                rows.append([number(step, 2), *map(number, row)])
        else:
            rows = [["alpha", "mean loss"]]
            for step, mean, error in zip(self.steps, self.mean, self.stderr, strict=True):
                rows.append([number(step, 2), with_error(mean, error)])
        return said(title, rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plain({**vars(self), "mean": self.mean, "stderr": self.stderr})


def landscape(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    dims: int = 1,
    points: int = 21,
    span: float = 1.0,
    directions: int = 3,
    seed: int = 0,
    progress: Report = None,
    params: draw.ParamSpec = None,
    micro_batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | None = None,
) -> LandscapeResult:
    """The loss along random filter-normalised directions: forward passes only.

    Args:
        model: as in :func:`seht.measure.trace`, and so are the arguments that are not named here.
        loss_fn: the mean loss of a batch.
        data: what it is measured on; every point reads all of it.
        dims: 1: along several directions; 2: on a plane.
        points: of the grid in each dimension; an odd number holds the model itself.
        span: from -span to span, in units of the filters' norms.
        directions: with ``dims=1``, how many; their spread is the error.
        seed: of the directions: models measured with the same seed share them.
        progress: as in :func:`seht.measure.trace`.
        params: which tensors.
        micro_batch: cut batches into so many examples.
        batch_dim: the examples' axis.
        limit: read so many examples and no more.
    """
    if dims not in (1, 2):
        raise ValueError(f"dims must be 1 or 2, not {dims!r}")
    check_count("points", points, 2, optional=False)
    check_count("directions", directions, optional=False)
    if not (math.isfinite(span) and span > 0):
        raise ValueError(f"span must be a positive number, not {span!r}")
    reporter = Reporter(progress, "landscape")
    steps = torch.linspace(-span, span, points, dtype=torch.float64).tolist()
    with measuring(
        model, loss_fn, data, params=params, micro_batch=micro_batch, batch_dim=batch_dim,
        limit=limit, seed=seed,
    ) as (problem, batches):  # fmt: skip
        count = directions if dims == 1 else 2
        ways = [filter_normalised(problem, seed, k) for k in range(count)]
        slices = _Slices(problem, batches, reporter, (count if dims == 1 else points) * points)
        try:
            centre = problem.mean_loss(batches)
            if dims == 1:
                rows = [[slices.loss(way, a) for a in steps] for way in ways]
            else:
                rows = [[slices.loss(ways[0], a, ways[1], b) for a in steps] for b in steps]
        finally:
            reporter.close()
        samples = sum(size for _, size in batches)
    return LandscapeResult(
        dims, tuple(steps), tuple(map(tuple, rows)), centre, samples, reporter.seconds
    )


def filter_normalised(problem: Problem, seed: int, place: int) -> dict[str, Tensor]:
    """A random direction whose filters have the norms of the model's."""
    way = {}
    for i, (name, weight) in enumerate(problem.chosen.tensors.items()):
        if weight.dim() < 2:
            way[name] = torch.zeros_like(weight)
            continue
        noise = unit_normal(weight.shape, seed, 14, place, i).to(weight)
        axes = tuple(range(1, weight.dim()))
        own = weight.detach().square().sum(axes, keepdim=True).sqrt()
        size = noise.square().sum(axes, keepdim=True).sqrt()
        way[name] = noise * (own / size.clamp(min=1e-30))
    return way


class _Slices:
    def __init__(self, problem: Problem, batches: Batches, reporter: Reporter, total: int) -> None:
        self._problem, self._batches = problem, batches
        self._reporter, self._total, self._done = reporter, total, 0

    def loss(
        self, way: dict[str, Tensor], a: float, other: dict[str, Tensor] | None = None, b: float = 0
    ) -> float:
        """The mean loss at w + a * way + b * other."""
        total = {n: a * d if other is None else a * d + b * other[n] for n, d in way.items()}
        value = moved_loss(self._problem, self._batches, total)
        self._done += 1
        self._reporter(self._done, self._total)
        return value


def moved_loss(problem: Problem, batches: Batches, shift: dict[str, Tensor]) -> float:
    """The mean loss at w + shift; the weights come back bit for bit."""
    with uninterrupted(), Weights(problem.chosen.tensors).moved(shift, 1.0):
        return problem.mean_loss(batches)
