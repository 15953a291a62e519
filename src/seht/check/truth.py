r"""The numerical truth: value and gradient of a Hessian-trace estimate from ordinary gradients.

For a probe s, with g the ordinary gradient of the unmodified model,

.. math::

    t = s^T H s &= s \cdot \frac{g(w + e s) - g(w - e s)}{2 e} + O(e^2), \\
    \nabla t &= \frac{g(w + e s) + g(w - e s) - 2 g(w)}{e^2} + O(e^2) .

The second line is the derivative of t along *every* direction at once, by the symmetry of third
derivatives. A step that is too large fails by truncation, one that is too small by rounding, and
one that crosses a kink is off by jump / e^2: each time another step gives another answer. So the
step walks down a ladder, and the truth is taken where two neighbouring rungs agree best; how far
they disagree is the truth's own error. Where they never agree there is no truth, and the caller
must not claim one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from seht.check.sandbox import Gradient, Sandbox
from seht.check.tape import NotRepeatable, Tape

LADDER = tuple(1e-3 * 4.0**-k for k in range(9))
"""Steps relative to the size of the weights, from 1e-3 down to 1.5e-8."""
_FLOOR = 1e-4
"""Derivatives so much smaller than those the size of gradient and weights suggests count as 0."""


class Inconclusive(RuntimeError):
    """Nothing could be measured; the message says why."""


@dataclass(frozen=True)
class Measured:
    """A number or vector, the size its errors are relative to, and its own relative error."""

    value: Tensor
    size: float
    noise: float

    def error(self, other: Tensor) -> float:
        """How far another answer is from this one, relative to its size."""
        return _ratio((other - self.value).norm().item(), self.size)

    def vanishes(self, need: float) -> bool:
        """Whether it cannot be told from zero."""
        return self.value.norm().item() <= need * self.size


@dataclass(frozen=True)
class Truth:
    """What a right engine answers to the task of this seed."""

    seed: int
    step: float
    loss: float
    base: Gradient
    """The gradient of the loss."""
    trace: Measured
    whole: Measured
    """The gradient of the trace in all parameters together."""
    parts: dict[str, Measured]
    """The same, tensor by tensor."""

    @property
    def noise(self) -> float:
        """Its own relative error: how far two steps disagree."""
        return max(self.trace.noise, self.whole.noise)


@dataclass(frozen=True)
class _Rung:
    step: float
    product: Gradient
    """H s."""
    gradient: Gradient
    """The gradient of s^T H s."""


def measure(box: Sandbox, seed: int, need: float) -> Truth:
    """The truth for one probe, its own error below ``need``; else :class:`Inconclusive`."""
    probe = _probe(box, seed)
    unit = _unit(box, probe)
    loss, base, tape = _centre(box)
    best: Truth | None = None
    last: _Rung | None = None
    for kappa in LADDER:
        rung = _rung(box, probe, kappa * unit, base, tape)
        if last is not None:
            truth = _compare(last, rung, probe, unit, seed, loss, base)
            if best is None or truth.noise < best.noise:
                best = truth
            elif best.noise < need:
                break  # from here on rounding makes it worse
        last = rung
    if best is None or not best.noise < need:
        raise Inconclusive(
            f"no two step sizes agree (at best to {best.noise if best else math.nan:.0e}, wanted "
            f"{need:.0e}): kinks lie too densely around these weights, or the model computes in "
            "less than float64 inside"
        )
    if best.trace.vanishes(need) and best.whole.vanishes(need):
        raise Inconclusive("the trace and its gradient vanish here, so there is nothing to compare")
    return best


def asymmetry(box: Sandbox, truth: Truth, seed: int) -> float:
    """How far s^T H d and d^T H s differ, relatively: 0 where g is the gradient of anything."""
    s, d = _probe(box, truth.seed), _probe(box, seed)
    _, base, tape = _centre(box)
    hs = _rung(box, s, truth.step, base, tape).product
    hd = _rung(box, d, truth.step, base, tape).product
    return _ratio(abs(_dot(d, hs) - _dot(s, hd)), _size(d, hs) + _size(s, hd))


def _probe(box: Sandbox, seed: int) -> Gradient:
    return {n: s.to(box.leaves[n]) for n, s in next(box.task(seed).probes()).items()}


def _unit(box: Sandbox, probe: Gradient) -> float:
    """The step that would move the probed weights by their own size."""
    weights = sum(box.leaves[name].detach().square().sum().item() for name in probe)
    return math.sqrt(weights / _dot(probe, probe)) or 1.0


def _centre(box: Sandbox) -> tuple[float, Gradient, Tape | None]:
    """Loss and gradient at the weights themselves, and a tape if replaying is faithful."""
    loss, plain = box.gradient()
    if not _flat(plain, plain).isfinite().all():
        raise Inconclusive("the ordinary gradient of the loss is not finite at these weights")
    if not _close(plain, box.gradient()[1]):
        raise Inconclusive(
            "the loss cannot be repeated: two evaluations at the same weights differ "
            "(a state carried from call to call, or randomness that no seed reaches)"
        )
    tape = Tape()
    try:
        box.gradient(tape=tape)
        _, replayed = box.gradient(tape=tape)
    except RuntimeError:  # an operation the tape does not understand: leave the kinks free
        return loss, plain, None
    return (loss, replayed, tape) if _close(plain, replayed) else (loss, plain, None)


def _rung(box: Sandbox, probe: Gradient, step: float, base: Gradient, tape: Tape | None) -> _Rung:
    try:
        _, plus = box.gradient(probe, step, tape)
        _, minus = box.gradient(probe, -step, tape)
    except NotRepeatable as error:
        raise Inconclusive(f"the loss cannot be repeated at other weights: {error}") from error
    product = {n: (plus[n] - minus[n]) / (2 * step) for n in base}
    gradient = {n: ((plus[n] - base[n]) + (minus[n] - base[n])) / step**2 for n in base}
    return _Rung(step, product, gradient)


def _compare(
    wide: _Rung,
    narrow: _Rung,
    probe: Gradient,
    unit: float,
    seed: int,
    loss: float,
    base: Gradient,
) -> Truth:
    """The narrow rung's answers, and how far the wide one's are from them."""

    def part(names: Iterable[str]) -> Measured:
        value, other = _flat(narrow.gradient, names), _flat(wide.gradient, names)
        usual = max(
            _flat(base, names).norm().item() / unit**2,
            _flat(narrow.product, names).norm().item() / unit,
        )
        size = max(value.norm().item(), _FLOOR * usual)
        return Measured(value, size, _ratio((value - other).norm().item(), size))

    value, other = _dot(probe, narrow.product), _dot(probe, wide.product)
    usual = _flat(base, base).norm().item() * math.sqrt(_dot(probe, probe)) / unit
    size = max(_size(probe, narrow.product), _FLOOR * usual)
    trace = Measured(
        torch.tensor(value, dtype=torch.float64), size, _ratio(abs(value - other), size)
    )
    parts = {name: part([name]) for name in base}
    return Truth(seed, narrow.step, loss, base, trace, part(base), parts)


def _flat(vectors: Gradient, names: Iterable[str]) -> Tensor:
    return torch.cat([vectors[name].flatten() for name in names])


def _dot(a: Gradient, b: Gradient) -> float:
    return math.fsum((part * b[name]).sum().item() for name, part in a.items())


def _size(a: Gradient, b: Gradient) -> float:
    """Like the inner product, but without cancellation between tensors."""
    return math.fsum(abs((part * b[name]).sum().item()) for name, part in a.items())


def _close(a: Gradient, b: Gradient) -> bool:
    x, y = _flat(a, a), _flat(b, a)
    return (x - y).norm().item() <= 1e-9 * x.norm().item()


def _ratio(error: float, size: float) -> float:
    """``error / size``; 0 where both vanish, infinite where an answer is not finite."""
    if not math.isfinite(error):
        return math.inf
    return error / size if size > 0 else (math.inf if error > 0 else 0.0)
