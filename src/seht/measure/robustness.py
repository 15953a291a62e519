r"""Robustness: how much the loss rises when weights are rounded, or disturbed in proportion.

*Rounding* to b bits: the nearest of :math:`2^b - 1` levels around zero, with a scale for each
output channel. *Noise*: Gaussian, with a deviation of a share f of each tensor's root mean square
:math:`r_t`; for small f the mean rise is :math:`\tfrac{f^2}{2} \sum_t r_t^2\,\mathrm{tr}(H_t)` on
smooth networks, :math:`H_t` a tensor's own block of the Hessian, which stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from seht.measure.trace import trace
from seht.replay.weights import Weights
from seht.tensors.interrupts import uninterrupted

LAYER_BITS = 4


@dataclass(frozen=True)
class Noise:
    """The rise of the loss under noise of one size."""

    rise: float
    stderr: float
    """Over draws; nan with one."""
    predicted: float
    """By the trace; far from ``rise`` where the noise is too large for a quadratic."""


@dataclass(frozen=True)
class RobustnessResult:
    """Rises of the loss."""

    loss: float
    rounded: Mapping[int, float]
    """By bits, all weights at once."""
    noise: Mapping[float, Noise]
    """By the share of each tensor's root mean square."""
    layers: Mapping[str, float]
    """By tensor, it alone rounded to 4 bits."""
    samples: int
    seconds: float

    def __str__(self) -> str:
        """A table of the rises."""
        rows = [("rise of the loss", "")]
        rows += [(f"rounded to {bits} bits", number(rise)) for bits, rise in self.rounded.items()]
        for share, found in self.noise.items():
            figure = (
                f"{with_error(found.rise, found.stderr)}, by the trace {number(found.predicted)}"
            )
            rows.append((f"noise of {share:.3g}", figure))
        rows += [(f"{name} alone to 4 bits", number(rise)) for name, rise in self.layers.items()]
        samples, time = f"{self.samples:,} samples", duration(self.seconds)
        return said(f"loss {number(self.loss)} on {samples}, {time}", rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plain(vars(self))


def robustness(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    bits: Sequence[int] = (8, 4, 3),
    noise: Sequence[float] = (0.01, 0.03, 0.1),
    draws: int = 4,
    seed: int = 0,
    progress: Report = None,
    params: draw.ParamSpec = None,
    micro_batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | None = None,
) -> RobustnessResult:
    """The rise of the loss with rounded and with disturbed weights, and which layers it comes from.

    A weight that is used in two places (tied) is changed in both, as one. What is rounded already
    rises by nothing at as many bits.

    Args:
        model: as in :func:`seht.measure.trace`, and so are the arguments that are not named here.
        loss_fn: the mean loss of a batch.
        data: what it is measured on; every figure and every layer reads all of it.
        bits: to which the weights are rounded, 2 to 16.
        noise: deviations, in shares of each tensor's root mean square.
        draws: of the noise, each used with both signs.
        seed: of the noise and of the trace.
        progress: as in :func:`seht.measure.trace`.
        params: which tensors are changed; all of two or more dimensions if not given.
        micro_batch: cut batches into so many examples.
        batch_dim: the examples' axis.
        limit: read so many examples and no more.
    """
    for count in bits:
        if not (isinstance(count, int) and 2 <= count <= 16):
            raise ValueError(f"bits must be whole numbers from 2 to 16, not {count!r}")
    for share in noise:
        if not (isinstance(share, (int, float)) and math.isfinite(share) and share > 0):
            raise ValueError(f"noise must be positive shares, such as 0.03, not {share!r}")
    check_count("draws", draws, optional=False)
    options: dict[str, Any] = {
        "params": params, "micro_batch": micro_batch, "batch_dim": batch_dim, "limit": limit,
        "seed": seed,
    }  # fmt: skip
    reporter = Reporter(progress, "robustness")
    with measuring(model, loss_fn, data, **options) as (problem, batches):
        try:
            near = _Near(problem, batches)
            rounding = {count: near.rise(near.to_levels(count)) for count in bits}
            noisy = {}
            for place, share in enumerate(noise):
                noisy[float(share)] = near.noise(share, draws, seed, place)
                reporter(place + 1, len(noise))
            levels = near.to_levels(LAYER_BITS)
            layers = {name: near.rise({name: shift}) for name, shift in levels.items()}
            squares = near.mean_squares()
        finally:
            reporter.close()
        samples = sum(size for _, size in batches)
    blocks = trace(model, loss_fn, data, per_layer=True, **options).layers or {}
    curvature = sum(squares[name] * layer.estimate for name, layer in blocks.items())
    return RobustnessResult(
        loss=near.loss,
        rounded=rounding,
        noise={
            share: Noise(rise, error, share**2 * curvature / 2)
            for share, (rise, error) in noisy.items()
        },
        layers=layers,
        samples=samples,
        seconds=reporter.seconds,
    )


def rounded(weight: Tensor, bits: int) -> Tensor:
    r"""To the nearest of :math:`2^b - 1` levels around zero, with a scale for each output channel.

    .. math:: s \,\mathrm{round}(w / s), \qquad s = \max |w| / (2^{b-1} - 1)

    over the entries of the channel, which is the first dimension.
    """
    top = 2 ** (bits - 1) - 1
    largest = weight.abs().flatten(1).amax(1) if weight.dim() > 1 else weight.abs().amax()
    scale = (largest / top).view(-1, *(1 for _ in weight.shape[1:]))
    return torch.where(scale > 0, torch.round(weight / scale) * scale, weight)


class _Near:
    """The loss at changed weights."""

    def __init__(self, problem: Problem, batches: Batches) -> None:
        self.problem, self.batches = problem, batches
        self.tensors = problem.chosen.tensors
        self.weights = Weights(self.tensors)
        self.loss = problem.mean_loss(batches)

    def rise(self, shifts: Mapping[str, Tensor]) -> float:
        """With these tensors moved."""
        every = {
            name: shifts[name] if name in shifts else torch.zeros_like(tensor)
            for name, tensor in self.tensors.items()
        }
        with uninterrupted(), self.weights.moved(every, 1.0):
            return self.problem.mean_loss(self.batches) - self.loss

    @torch.no_grad()
    def to_levels(self, bits: int) -> dict[str, Tensor]:
        """From each tensor to its rounded one."""
        return {name: rounded(tensor, bits) - tensor for name, tensor in self.tensors.items()}

    def noise(self, share: float, draws: int, seed: int, place: int) -> tuple[float, float]:
        """Mean and standard error; with both signs the gradient's part cancels."""
        sizes = {name: share * math.sqrt(square) for name, square in self.mean_squares().items()}
        found = []
        for k in range(draws):
            shift = {
                name: (sizes[name] * unit_normal(tensor.shape, seed, 19, place, k, i)).to(tensor)
                for i, (name, tensor) in enumerate(self.tensors.items())
            }
            back = {name: -tensor for name, tensor in shift.items()}
            found.append((self.rise(shift) + self.rise(back)) / 2)
        values = torch.tensor(found, dtype=torch.float64)
        error = float(values.std() / math.sqrt(draws)) if draws > 1 else math.nan
        return float(values.mean()), error

    def mean_squares(self) -> dict[str, float]:
        """Of each tensor's entries."""
        return {
            name: float(tensor.detach().double().square().mean())
            for name, tensor in self.tensors.items()
        }
