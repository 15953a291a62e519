r"""Sharpness: how much the loss rises when the weights are moved by a given distance.

*Random*: :math:`E[L(w + \rho u)] - L(w)` with u uniform on the unit sphere. For small
:math:`\rho` it tends to :math:`\rho^2\,\mathrm{tr}(H) / 2n` on smooth networks, n the number of
weights (a ReLU network has kinks besides, which the trace does not see). Each u is used with both
signs, so that the gradient's part cancels.

*Adversarial*: :math:`\max_{|d| \le \rho} L(w + d) - L(w)`, from below: projected gradient ascent
that starts with SAM's step :math:`\rho\,g / |g|` (Foret et al., arXiv 2010.01412) and keeps the
best point seen. A maximum that a search finds is a lower bound of the true one; ``gain`` says how
much the last steps still added.
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
from seht.measure.problem import LossFn, measuring
from seht.measure.product import Product
from seht.measure.progress import Report, Reporter
from seht.measure.results import plain
from seht.replay.weights import Weights
from seht.tensors.interrupts import uninterrupted


@dataclass(frozen=True)
class SharpnessResult:
    """Rises of the loss at distance ``rho``."""

    rho: float
    relative: float
    """rho over the norm of the weights."""
    loss: float
    random: float
    """Mean rise in random directions."""
    random_stderr: float
    """Over directions; nan with one."""
    random_worst: float
    """The largest single one."""
    adversarial: float
    """The largest rise that the ascent found: a lower bound."""
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
        """A table of the rises."""
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

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plain(vars(self))


def sharpness(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    rho: float = 0.05,
    draws: int = 8,
    steps: int = 8,
    seed: int = 0,
    progress: Report = None,
    params: draw.ParamSpec = None,
    micro_batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | None = None,
) -> SharpnessResult:
    """The rise of the loss under random and under adversarial weight changes of norm ``rho``.

    Args:
        model: as in :func:`seht.measure.trace`, and so are the arguments that are not named here.
        loss_fn: the mean loss of a batch.
        data: what it is measured on; every direction and step reads all of it.
        rho: the distance, as SAM has it.
        draws: random directions, each used with both signs.
        steps: of the ascent.
        seed: of the directions.
        progress: as in :func:`seht.measure.trace`.
        params: which tensors are moved.
        micro_batch: cut batches into so many examples.
        batch_dim: the examples' axis.
        limit: read so many examples and no more.
    """
    if not (isinstance(rho, (int, float)) and math.isfinite(rho) and rho > 0):
        raise ValueError(f"rho must be a positive number, not {rho!r}")
    check_count("draws", draws, optional=False)
    check_count("steps", steps, optional=False)
    reporter = Reporter(progress, "sharpness")
    with measuring(
        model, loss_fn, data, params=params, micro_batch=micro_batch, batch_dim=batch_dim,
        limit=limit, seed=seed,
    ) as (problem, batches):  # fmt: skip
        try:
            ball = _Ball(Product(problem, batches), batches, rho)
            loss = problem.mean_loss(batches)
            rises = []
            for k in range(draws):
                u = unit_normal(torch.Size([ball.product.size]), seed, 15, k)
                u *= rho / u.norm()
                rises.append((ball.loss(u) + ball.loss(-u)) / 2 - loss)
                reporter(k + 1, draws + steps)
            path = []
            for value in ball.ascend(steps):
                path.append(value - loss)
                reporter(draws + len(path), draws + steps)
        finally:
            reporter.close()
        weight_norm, samples = problem.weight_norm, sum(size for _, size in batches)
    values = torch.tensor(rises, dtype=torch.float64)
    late = max(1, steps // 4)
    return SharpnessResult(
        rho=float(rho),
        relative=rho / weight_norm if weight_norm else math.inf,
        loss=loss,
        random=float(values.mean()),
        random_stderr=float(values.std() / math.sqrt(draws)) if draws > 1 else math.nan,
        random_worst=float(values.max()),
        adversarial=max(path),
        first_step=path[0],
        gain=max(path) - max(path[:-late]) if len(path) > late else math.nan,
        draws=draws,
        steps=steps,
        samples=samples,
        weights=ball.product.size,
        weight_norm=weight_norm,
        seconds=reporter.seconds,
    )


class _Ball:
    """The points within rho of the model."""

    def __init__(self, product: Product, batches: Batches, rho: float) -> None:
        self.product, self.batches, self.rho = product, batches, rho
        self.weights = Weights(product.problem.chosen.tensors)

    def loss(self, shift: Tensor) -> float:
        with uninterrupted(), self.weights.moved(self._named(shift), 1.0):
            return self.product.problem.mean_loss(self.batches)

    def gradient(self, shift: Tensor) -> Tensor:
        with uninterrupted(), self.weights.moved(self._named(shift), 1.0):
            return self.product.gradient()

    def ascend(self, steps: int) -> Any:
        """The loss after each step of the ascent, on the sphere."""
        shift = torch.zeros(self.product.size, dtype=torch.float64)
        rate, best = self.rho, -math.inf
        for _ in range(steps):
            g = self.gradient(shift)
            if not g.norm() > 0:  # nowhere to climb from: any direction will do
                g = unit_normal(shift.shape, 0, 16)
            tried = shift + rate * g / g.norm()
            tried *= self.rho / tried.norm()
            value = self.loss(tried)
            yield value
            if value > best:
                best, shift = value, tried
            else:  # overshot: go back and take a smaller step
                rate /= 2

    def _named(self, shift: Tensor) -> dict[str, Tensor]:
        names = self.product.problem.chosen.tensors
        return dict(zip(names, self.product.unflatten(shift), strict=True))
