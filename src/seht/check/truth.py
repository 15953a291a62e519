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
must not claim one. The Gauss-Newton trace has lines of its own (:mod:`seht.check.outputs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from seht.check.outputs import Outputs, gauss_newton
from seht.check.sandbox import Gradient, Sandbox
from seht.check.tape import NotRepeatable, Tape
from seht.estimators import SehtS

LADDER = tuple(1e-3 * 4.0**-k for k in range(9))
"""Steps relative to the size of the weights, from 1e-3 down to 1.5e-8."""
_FIRST = 2
"""The rung to begin on, 6e-5, where most networks are smooth and rounding is far: two rungs are
enough then. The walk goes down from it, and up from it where that gave nothing."""
_MOST = 0.9
_FLOOR = 1e-4
"""Derivatives smaller than this, relative to the size of gradient and weights, count as 0."""


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
    """The right answer to the task of this seed."""

    seed: int
    kappa: float
    """The step that gave it, relative to the size of the weights."""
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

    def sharp(self, need: float) -> bool:
        """Whether nearly every tensor's part is known too, and the whole with room to spare."""
        known = sum(part.noise < need for part in self.parts.values())
        return self.noise < need / 2 and known >= _MOST * len(self.parts)


@dataclass(frozen=True)
class _Rung:
    kappa: float
    trace: float
    size: float
    """Like the trace, but without cancellation between tensors."""
    product: Gradient
    """H s, or G s."""
    gradient: Gradient
    """Of the trace."""


def measure(box: Sandbox, seed: int, need: float) -> Truth:
    """The truth for one task, its own error below ``need``; else :class:`Inconclusive`."""
    if isinstance(box.form.estimator, SehtS):
        raise Inconclusive(
            "differences of whole batches say nothing about a probe for each example; "
            "estimator='seht-h' goes through the same passes: check that"
        )
    ladder = _Ladder(box, seed)
    first = ladder.rung(LADDER[_FIRST])
    best = _walk(ladder, first, LADDER[_FIRST + 1 :], need)
    if not best.noise < need:
        best = min(best, _walk(ladder, first, LADDER[_FIRST - 1 :: -1], need), key=_noise)
    if not best.noise < need:
        raise Inconclusive(
            f"no two step sizes agree (at best to {best.noise:.0e}, wanted "
            f"{need:.0e}): kinks lie too densely around these weights, or the model computes in "
            "less than float64 inside"
        )
    if best.trace.vanishes(need) and best.whole.vanishes(need):
        raise Inconclusive("the trace and its gradient vanish here, so there is nothing to compare")
    return best


def _walk(ladder: _Ladder, last: _Rung, kappas: Iterable[float], need: float) -> Truth:
    """The best of the truths between neighbouring rungs, until it is good enough or gets worse."""
    found: list[Truth] = []
    for kappa in kappas:
        rung = ladder.rung(kappa)
        wide, narrow = sorted((last, rung), key=lambda one: -one.kappa)
        found.append(ladder.compare(wide, narrow))
        best = min(found, key=_noise)
        if best.noise < need and (best is not found[-1] or best.sharp(need)):
            break  # from here on rounding makes it worse, or there is nothing to be gained
        last = rung
    return min(found, key=_noise)


def _noise(truth: Truth) -> float:
    return truth.noise


def asymmetry(box: Sandbox, truth: Truth, seed: int) -> float:
    """How far s^T H d and d^T H s differ, relatively: 0 if g is the gradient of some function."""
    s, d = _probes(box, truth.seed)[0], _probes(box, seed)[0]
    _, base, tape = _centre(box)
    hs, hd = (_hessian(box, p, truth.kappa * _unit(box, p), base, tape)[0] for p in (s, d))
    return _ratio(abs(_dot(d, hs) - _dot(s, hd)), _size(d, hs) + _size(s, hd))


class _Ladder:
    """The differences of one task at one step after the other."""

    def __init__(self, box: Sandbox, seed: int) -> None:
        self._box, self._seed = box, seed
        self._probes = _probes(box, seed)
        self._scale = box.form.estimator.scale / len(self._probes)
        self._units = [_unit(box, probe) for probe in self._probes]
        self._loss, self._base, self._tape = _centre(box)
        ggn = box.form.curvature == "ggn"
        self._outputs = Outputs(box, self._tape) if ggn else None

    def rung(self, kappa: float) -> _Rung:
        """The mean over the probes, with a step of kappa times the weights' own size."""
        trace, size = 0.0, 0.0
        product = {n: torch.zeros_like(part) for n, part in self._base.items()}
        gradient = {n: torch.zeros_like(part) for n, part in self._base.items()}
        for probe, unit in zip(self._probes, self._units, strict=True):
            along, slope = self._differences(probe, kappa, unit)
            trace += self._scale * _dot(probe, along)
            size += self._scale * _size(probe, along)
            for n in self._base:
                product[n] += self._scale * along[n]
                gradient[n] += self._scale * slope[n]
        return _Rung(kappa, trace, size, product, gradient)

    def _differences(self, probe: Gradient, kappa: float, unit: float) -> tuple[Gradient, Gradient]:
        try:
            if self._outputs is not None:
                return gauss_newton(self._outputs, probe, kappa * unit, kappa)
            return _hessian(self._box, probe, kappa * unit, self._base, self._tape)
        except NotRepeatable as error:
            raise Inconclusive(f"the loss cannot be repeated at other weights: {error}") from error

    def compare(self, wide: _Rung, narrow: _Rung) -> Truth:
        """The narrow rung's answers, and how far the wide one's are from them."""
        base, unit = self._base, self._units[0]

        def part(names: Iterable[str]) -> Measured:
            value, other = _flat(narrow.gradient, names), _flat(wide.gradient, names)
            usual = max(
                _flat(base, names).norm().item() / unit**2,
                _flat(narrow.product, names).norm().item() / unit,
            )
            size = max(value.norm().item(), _FLOOR * usual)
            return Measured(value, size, _ratio((value - other).norm().item(), size))

        probe = self._probes[0]
        usual = _flat(base, base).norm().item() * math.sqrt(_dot(probe, probe)) / unit
        size = max(narrow.size, _FLOOR * usual)
        trace = Measured(
            torch.tensor(narrow.trace, dtype=torch.float64),
            size,
            _ratio(abs(narrow.trace - wide.trace), size),
        )
        parts = {name: part([name]) for name in base}
        return Truth(self._seed, narrow.kappa, self._loss, base, trace, part(base), parts)


def _probes(box: Sandbox, seed: int) -> list[Gradient]:
    return [{n: s.to(box.leaves[n]) for n, s in p.items()} for p in box.task(seed).probes()]


def _unit(box: Sandbox, probe: Gradient) -> float:
    """The step that would move the probed weights by their own size."""
    weights = sum(box.leaves[name].detach().square().sum().item() for name in probe)
    return math.sqrt(weights / (_dot(probe, probe) or 1.0)) or 1.0


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


def _hessian(
    box: Sandbox, probe: Gradient, step: float, base: Gradient, tape: Tape | None
) -> tuple[Gradient, Gradient]:
    """H s and the gradient of s^T H s."""
    _, plus = box.gradient(probe, step, tape)
    _, minus = box.gradient(probe, -step, tape)
    product = {n: (plus[n] - minus[n]) / (2 * step) for n in base}
    return product, {n: ((plus[n] - base[n]) + (minus[n] - base[n])) / step**2 for n in base}


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
