"""Robustness: how much the loss rises when weights are rounded, or disturbed in proportion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from seht.errors import check_count, check_options, check_positive, warn
from seht.measure.data import kept
from seht.measure.keep import unit_normal
from seht.measure.numbers import duration, number, said, with_error
from seht.measure.objective import Measurement, Options, measuring
from seht.measure.results import PlainResult
from seht.measure.stats import mean_error
from seht.measure.trace import read
from seht.task import LossFn

LAYER_BITS = 4


@dataclass(frozen=True)
class Noise:
    """The rise of the loss under noise of one size."""

    rise: float
    stderr: float
    """Standard error over draws; nan with one draw."""
    predicted: float
    """What the trace predicts; far from ``rise`` if the noise is too large for a quadratic."""
    predicted_stderr: float
    """Its standard error over the trace's probes."""


@dataclass(frozen=True)
class RobustnessResult(PlainResult):
    """How much the loss rises with rounded and with disturbed weights."""

    loss: float
    """The loss of the model itself."""
    rounded: Mapping[int, float]
    """The rise with all weights rounded, by the number of bits."""
    noise: Mapping[float, Noise]
    """The rise under noise, by its size relative to each tensor's root mean square."""
    layers: Mapping[str, float]
    """The rise with one tensor rounded to 4 bits, by its name."""
    samples: int
    seconds: float

    def __str__(self) -> str:
        rows = [("rise of the loss", "")]
        rows += [(f"rounded to {bits} bits", number(rise)) for bits, rise in self.rounded.items()]
        for share, found in self.noise.items():
            predicted = with_error(found.predicted, found.predicted_stderr)
            figure = f"{with_error(found.rise, found.stderr)}, by the trace {predicted}"
            rows.append((f"noise of {share:.3g}", figure))
        rows += [(f"{name} alone to 4 bits", number(rise)) for name, rise in self.layers.items()]
        samples, time = f"{self.samples:,} samples", duration(self.seconds)
        return said(f"loss {number(self.loss)} on {samples}, {time}", rows)


def robustness(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    bits: Sequence[int] = (8, 4, 3),
    noise: Sequence[float] = (0.01, 0.03, 0.1),
    draws: int = 4,
    **options: Unpack[Options],
) -> RobustnessResult:
    """The rise of the loss with rounded and with disturbed weights, and which layers it comes from.

    Rounding takes each weight to the nearest multiple of s = max |w| / (2ᵇ⁻¹ − 1), with one s for
    each output channel. Gaussian noise of f times each tensor's root mean square r should raise the
    loss by f²/2 Σ r² tr(H_t), the sum over tensors t and their own blocks of the Hessian; that
    prediction stands beside the measured rise. With ReLUs it can be far too low: a trained network
    has examples on its kinks, which no derivative sees.

    A tied weight is changed in all its places at once. A model with integer (quantised) weights is
    refused, because they could not be changed. A layer that is rounded to 4 bits already is named
    in a warning.

    Cost, over the data: a forward pass for each number of bits and each layer, two for each draw of
    each noise, and with noise a trace per layer (:func:`seht.measure.trace`).

    Example:
        ```python
        found = seht.measure.robustness(model, loss_fn, batch, bits=(8, 4))
        print(found.rounded[4], found.layers)
        ```

    Args:
        model: as in :func:`seht.measure.trace`, and so are ``loss_fn`` and ``data``.
        loss_fn: the mean loss of a batch.
        data: the data to measure on; every figure and every layer reads all of it.
        bits: round to these numbers of bits, each from 2 to 16; without any, no layer is rounded
            either.
        noise: standard deviations f of the noise, relative to each tensor's root mean square.
        draws: how often noise of each size is drawn, each time used with both signs.
        options: ``seed`` (of the noise and of the trace), ``progress``, ``params`` (which tensors
            are changed; all of two or more dimensions if not given), ``micro_batch``,
            ``batch_dim`` and ``limit``, as in :func:`seht.measure.trace`.
    """
    check_options(robustness, options, Options.__annotations__)
    for name, several in (("bits", bits), ("noise", noise)):
        if isinstance(several, str) or not isinstance(several, Iterable):
            raise TypeError(f"{name} must be a sequence such as ({several!r},), not {several!r}")
    bits, noise = tuple(bits), tuple(noise)
    for count in bits:
        if not (isinstance(count, int) and 2 <= count <= 16):
            raise ValueError(f"bits must be whole numbers from 2 to 16, not {count!r}")
    for share in noise:
        check_positive("noise", share)
    check_count("draws", draws)
    if options.get("params") is None:
        check_floating(model)
    data = kept(data)  # the trace reads it again
    with measuring("robustness", model, loss_fn, data, **options) as m:
        loss = m.loss()
        rounding = {count: m.loss_at(to_levels(m.tensors, count)) - loss for count in bits}
        squares = {n: float(w.detach().double().square().mean()) for n, w in m.tensors.items()}
        noisy, layers = {}, {}
        for place, share in enumerate(noise):
            sizes = {name: share * math.sqrt(square) for name, square in squares.items()}
            noisy[float(share)] = _noise(m, loss, sizes, draws, place)
            m.tell(place + 1, len(noise) + len(m.tensors))
        shifts = to_levels(m.tensors, LAYER_BITS) if bits else {}
        _say_rounded(m.tensors, shifts)
        for name, shift in shifts.items():
            layers[name] = m.loss_at({name: shift}) - loss
            m.tell(len(noise) + len(layers), len(noise) + len(m.tensors))
    if noise:
        readings = read(model, loss_fn, data, per_layer=True, **options)
        curvature, error = readings.weighted(list(squares.values()))
    return RobustnessResult(
        loss=loss,
        rounded=rounding,
        noise={
            share: Noise(*found, share**2 * curvature / 2, share**2 * error / 2)
            for share, found in noisy.items()
        },
        layers=layers,
        samples=m.samples,
        seconds=m.seconds,
    )


def check_floating(model: nn.Module) -> None:
    """Refuse quantised weights: they cannot be moved, so the rise would not be the model's."""
    whole = [
        name
        for name, module in model.named_modules()
        if type(module).__module__.startswith("torch.ao.nn.quantized")
    ]
    whole += [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
    whole += [
        name
        for name, kept in model.named_buffers()
        if kept.dim() >= 2 and kept.dtype in (torch.int8, torch.uint8)
    ]
    if whole:
        raise ValueError(
            f"{whole[0]} holds whole numbers: it is quantised already; measure the float32 model "
            "that it was made from, or name the tensors to change in params="
        )


@torch.no_grad()
def _say_rounded(tensors: Mapping[str, Tensor], shifts: Mapping[str, Tensor]) -> None:
    """Warn where a rounding changes nothing."""
    largest = {name: tensors[name].abs().max() for name in shifts if tensors[name][0].numel() > 1}
    found = [n for n, most in largest.items() if 0 < most > 1e5 * shifts[n].abs().max()]
    if found:
        warn(
            f"{', '.join(found)}: rounded to {LAYER_BITS} bits already, so that {LAYER_BITS} bits "
            "cost nothing here; measure the weights from before the rounding"
        )


@torch.no_grad()
def to_levels(tensors: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """From each tensor to its rounded one."""
    return {name: rounded(tensor, bits) - tensor for name, tensor in tensors.items()}


def _noise(
    m: Measurement, loss: float, sizes: Mapping[str, float], draws: int, place: int
) -> tuple[float, float]:
    """Mean and standard error of the rise; with both signs the gradient's part cancels."""
    found = []
    for k in range(draws):
        shift = {
            name: (sizes[name] * unit_normal(tensor.shape, m.seed, 19, place, k, i)).to(tensor)
            for i, (name, tensor) in enumerate(m.tensors.items())
        }
        back = {name: -part for name, part in shift.items()}
        found.append((m.loss_at(shift) - loss + (m.loss_at(back) - loss)) / 2)
    mean, error = mean_error(found)
    return float(mean), float(error)


def rounded(weight: Tensor, bits: int) -> Tensor:
    r"""To the nearest of :math:`2^b - 1` levels around zero, with a scale for each output channel.

    .. math:: s \,\mathrm{round}(w / s), \qquad s = \max |w| / (2^{b-1} - 1)

    over the entries of the channel, which is the first dimension.
    """
    top = 2 ** (bits - 1) - 1
    largest = weight.abs().flatten(1).amax(1) if weight.dim() > 1 else weight.abs().amax()
    scale = (largest / top).view(-1, *(1 for _ in weight.shape[1:]))
    return torch.where(scale > 0, torch.round(weight / scale) * scale, weight)
