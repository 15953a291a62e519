r"""Sharpness: how much the loss rises when the weights are moved by a given distance.

In random directions the mean rise tends to :math:`\rho^2\,\mathrm{tr}(H) / 2n` for small
:math:`\rho`, on smooth networks of n weights (a ReLU network has kinks besides, which the trace
does not see). Each direction is used with both signs, so that the gradient's part cancels. The
maximum that a search finds is a lower bound of the true one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from seht.errors import check_count, check_options, check_positive
from seht.measure.keep import unit_normal
from seht.measure.numbers import duration, number, said, with_error
from seht.measure.objective import Measurement, Options, measuring
from seht.measure.results import PlainResult
from seht.measure.stats import mean_error
from seht.task import LossFn


@dataclass(frozen=True)
class SharpnessResult(PlainResult):
    """How much the loss rises at distance ``rho`` from the model."""

    rho: float
    relative: float
    """rho over the norm of the weights."""
    loss: float
    """The loss of the model itself."""
    random: float
    """Mean rise in random directions."""
    random_stderr: float
    """Its standard error over directions; nan with one direction."""
    random_worst: float
    """The largest rise in one random direction."""
    adversarial: float
    """The largest rise that gradient ascent found: a lower bound of the true maximum."""
    first_step: float
    """The rise after SAM's one step."""
    gain: float
    """What the last quarter of the ascent still added."""
    draws: int
    steps: int
    samples: int
    weights: int
    weight_norm: float
    seconds: float

    def __str__(self) -> str:
        rows = [
            ("rise of the loss", ""),
            ("random, mean", with_error(self.random, self.random_stderr)),
            ("random, largest", number(self.random_worst)),
            ("SAM's one step", number(self.first_step)),
            ("adversarial, at least", number(self.adversarial)),
            ("... of which the last steps", number(self.gain)),
        ]
        title = (
            f"loss {number(self.loss)}, weights moved by {number(self.rho)} ({self.relative:.2%} "
            f"of their norm) on {self.samples:,} samples, {duration(self.seconds)}"
        )
        return said(title, rows)


def sharpness(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    rho: float = 0.05,
    draws: int = 8,
    steps: int = 8,
    **options: Unpack[Options],
) -> SharpnessResult:
    """The rise of the loss under random and under adversarial weight changes of norm ``rho``.

    The mean and the maximum of L(w + d) − L(w) over |d| = ρ. The maximum is searched for by
    gradient ascent, whose first step is that of SAM (Foret et al., arXiv 2010.01412).

    Cost, over the data: two forward passes for each draw, a gradient and a forward pass for each
    step of the ascent, and one forward pass more.

    Example:
        ```python
        print(seht.measure.sharpness(model, loss_fn, batch, rho=0.05))
        ```

    Args:
        model: as in :func:`seht.measure.trace`, and so are ``loss_fn`` and ``data``.
        loss_fn: the mean loss of a batch.
        data: the data to measure on; every direction and step reads all of it.
        rho: ρ, the distance in weight space, as in SAM.
        draws: the number of random directions, each used with both signs.
        steps: the number of steps of the ascent.
        options: ``seed`` (of the directions), ``progress``, ``params`` (which tensors are moved),
            ``micro_batch``, ``batch_dim`` and ``limit``, as in :func:`seht.measure.trace`.
    """
    check_options(sharpness, options, Options.__annotations__)
    check_positive("rho", rho)
    check_count("draws", draws)
    check_count("steps", steps)
    with measuring("sharpness", model, loss_fn, data, **options) as m:
        loss = m.loss()
        rises = []
        for k in range(draws):
            u = unit_normal(torch.Size([m.size]), m.seed, 15, k)
            u *= rho / u.norm()
            both = m.loss_at(m.parts(u)) + m.loss_at(m.parts(-u))
            rises.append(both / 2 - loss)
            m.tell(k + 1, draws + steps)
        path = []
        for value in ascent(m, rho, steps):
            path.append(value - loss)
            m.tell(draws + len(path), draws + steps)
        weight_norm = m.objective.weight_norm
    mean, stderr = mean_error(rises)
    late = max(1, steps // 4)
    return SharpnessResult(
        rho=float(rho),
        relative=rho / weight_norm if weight_norm else math.inf,
        loss=loss,
        random=float(mean),
        random_stderr=float(stderr),
        random_worst=max(rises),
        adversarial=max(path),
        first_step=path[0],
        gain=max(path) - max(path[:-late]) if len(path) > late else math.nan,
        draws=draws,
        steps=steps,
        samples=m.samples,
        weights=m.size,
        weight_norm=weight_norm,
        seconds=m.seconds,
    )


def ascent(m: Measurement, rho: float, steps: int) -> Iterator[float]:
    """The loss after each step of the ascent, on the sphere of radius rho around the model."""
    shift = torch.zeros(m.size, dtype=torch.float64)
    rate, best = rho, -math.inf
    for _ in range(steps):
        with m.moved(m.parts(shift)):
            g = m.gradient()
        if not g.norm() > 0:  # nowhere to climb from: any direction will do
            g = unit_normal(shift.shape, 0, 16)
        tried = shift + rate * g / g.norm()
        tried *= rho / tried.norm()
        value = m.loss_at(m.parts(tried))
        yield value
        if value > best:
            best, shift = value, tried
        else:  # overshot: go back and take a smaller step
            rate /= 2
