"""The loss landscape around a model: filter-normalised slices in one or two random directions.

A filter is a row of a weight's first axis. Biases and norm scales stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from seht.errors import check_count, check_options, check_positive
from seht.measure.keep import unit_normal
from seht.measure.numbers import duration, number, said, with_error
from seht.measure.objective import Options, measuring
from seht.measure.results import PlainResult
from seht.measure.stats import mean_error
from seht.task import LossFn

Shift = dict[str, Tensor]
"""How far each tensor is moved."""


@dataclass(frozen=True)
class LandscapeResult(PlainResult):
    """The loss on a grid of relative weight changes."""

    dims: int
    steps: tuple[float, ...]
    """The values of α (and β); at 1 each filter is moved by its own norm."""
    losses: tuple[tuple[float, ...], ...]
    """In one dimension a row for each direction, in two a row for each β. May be infinite."""
    centre: float
    """The loss of the model itself."""
    samples: int
    seconds: float

    beside = ("mean", "stderr")

    @property
    def mean(self) -> tuple[float, ...]:
        """One dimension: the mean over directions at each step."""
        return tuple(mean_error(self.losses)[0].tolist())

    @property
    def stderr(self) -> tuple[float, ...]:
        """One dimension: its standard error over directions; nan with one of them."""
        if self.dims == 2:
            return (math.nan,) * len(self.steps)
        return tuple(mean_error(self.losses)[1].tolist())

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


def landscape(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    dims: int = 1,
    points: int = 21,
    span: float = 1.0,
    directions: int = 3,
    **options: Unpack[Options],
) -> LandscapeResult:
    """The loss along random filter-normalised directions (Li et al., arXiv 1712.09913).

    L(w + α d), or L(w + α d₁ + β d₂) on a plane. Each filter of d is scaled to the norm of the same
    filter in w, so that models of different scale can be compared.

    Cost: a forward pass over the data for each point of each direction, and one more.

    Example:
        ```python
        found = seht.measure.landscape(model, loss_fn, batch, points=5)
        print(found.steps, found.mean)
        ```

    Args:
        model: as in :func:`seht.measure.trace`, and so are ``loss_fn`` and ``data``.
        loss_fn: the mean loss of a batch.
        data: the data to measure on; every point reads all of it.
        dims: 1 for lines along several directions, 2 for one plane.
        points: points of the grid in each dimension; with an odd number the model is one of them.
        span: α and β go from -span to span, in units of the filters' norms.
        directions: with ``dims=1``, how many directions; their spread is the error.
        options: ``seed`` (of the directions: models measured with the same seed share them),
            ``progress``, ``params``, ``micro_batch``, ``batch_dim`` and ``limit``, as in
            :func:`seht.measure.trace`.
    """
    check_options(landscape, options, Options.__annotations__)
    if dims not in (1, 2):
        raise ValueError(f"dims must be 1 or 2, not {dims!r}")
    check_count("points", points, 2)
    check_count("directions", directions)
    check_positive("span", span)
    # Symmetric, so that the middle one is 0 and not what rounding leaves of it.
    steps = [span * (2 * k - points + 1) / (points - 1) for k in range(points)]
    with measuring("landscape", model, loss_fn, data, **options) as m:
        count = directions if dims == 1 else 2
        ways = [filter_normalised(m.tensors, m.seed, k) for k in range(count)]
        total, done = points * (count if dims == 1 else points), 0

        def loss(a: float, way: Shift, b: float = 0.0, other: Shift | None = None) -> float:
            nonlocal done
            done += 1
            m.tell(done, total)
            shift = {n: a * d if other is None else a * d + b * other[n] for n, d in way.items()}
            return m.loss_at(shift)

        centre = m.loss()
        if dims == 1:
            rows = [tuple(loss(a, way) for a in steps) for way in ways]
        else:
            rows = [tuple(loss(a, ways[0], b, ways[1]) for a in steps) for b in steps]
    return LandscapeResult(dims, tuple(steps), tuple(rows), centre, m.samples, m.seconds)


def filter_normalised(weights: Mapping[str, Tensor], seed: int, place: int) -> Shift:
    """A random direction whose filters have the norms of the model's."""
    way = {}
    for i, (name, weight) in enumerate(weights.items()):
        if weight.dim() < 2:
            way[name] = torch.zeros_like(weight)
            continue
        noise = unit_normal(weight.shape, seed, 14, place, i).to(weight)
        axes = tuple(range(1, weight.dim()))
        own = weight.detach().square().sum(axes, keepdim=True).sqrt()
        size = noise.square().sum(axes, keepdim=True).sqrt()
        way[name] = noise * (own / size.clamp(min=1e-30))
    return way
