"""PyTorch's own database of operators as programs: every float in a sample is a weight.

The loss is a fixed random combination of the outputs and their squares. The truth is nested
autograd or, where PyTorch has no second derivative or a wrong one, a central difference of plain
gradients: they fail on different operators, and the library must agree with one of them.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import seht
from programs.judge import refusal, size
from programs.truth import dot, gradient
from seht import probes

SEED, NOISE = 3, 5
BOUND, LARGEST = 1e-5, 2_000
KAPPAS = (1e-4, 1e-5, 1e-3, 1e-6)
DIFFERENCES = (1e-4, 1e-3, 1e-5)


class Unusable(Exception):
    """No program: not differentiable here, too large, or not finite."""


class Sample(nn.Module):
    """One call of an operator."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op, self.sample = op, sample
        self.parts, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [i for i, part in enumerate(self.parts) if _floating(part)]
        self.weights = nn.ParameterList(self.parts[i].detach().clone() for i in self.places)
        if not 0 < sum(w.numel() for w in self.weights) <= LARGEST:
            raise Unusable("no weights, or too many")
        if not all(w.isfinite().all() for w in self.weights):
            raise Unusable("weights that cannot move")

    def forward(self) -> Tensor:
        parts = list(self.parts)
        for place, w in zip(self.places, self.weights, strict=True):
            # A view of the weight: an operator may write into it, or ask for a tensor's own type.
            parts[place] = w * 1.0
        first, args, kwargs = tree_unflatten(parts, self.spec)
        out = self.op.gradcheck_wrapper(self.op.get_op(), first, *args, **kwargs)
        if self.sample.output_process_fn_grad is not None:
            out = self.sample.output_process_fn_grad(out)
        return _combined([part for part in tree_leaves(out) if _differentiable(part)])

    def closure(self) -> Tensor:
        torch.manual_seed(NOISE)
        return self()


def _floating(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.float64 and part.layout == torch.strided


def _differentiable(part: Any) -> bool:
    return isinstance(part, Tensor) and part.requires_grad and part.layout == torch.strided


def _combined(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(NOISE)
    total = torch.zeros((), dtype=torch.float64)
    for out in outputs:
        y = torch.view_as_real(out) if out.is_complex() else out
        one, two = (
            torch.randn(y.shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        total = total + (y * one).sum() + 0.5 * (y * two).square().sum()
    return total


class Sides:
    """Value and gradient of s^T H s, by nested autograd or by differences."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.leaves = sample, list(sample.weights)
        self.sigma = [
            seht.SehtH().entries(w.shape, probes.entry_seed(SEED, 0, i), w.device).double()
            for i, w in enumerate(self.leaves)
        ]
        self.slope = self._slope()
        if not all(g.isfinite().all() for g in self.slope):
            raise Unusable("not finite")

    def _slope(self) -> list[Tensor]:
        try:
            found = gradient(self.sample.closure(), self.leaves)
            return [g if g.layout is torch.strided else g.to_dense() for g in found]
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise Unusable(str(error)) from error

    def nested(self) -> tuple[Tensor, list[Tensor]]:
        g = gradient(self.sample.closure(), self.leaves, keep=True)
        trace = dot(gradient(dot(g, self.sigma), self.leaves, keep=True), self.sigma)
        return trace.detach(), gradient(trace, self.leaves)

    def difference(self, kappa: float) -> tuple[Tensor, list[Tensor]]:
        e = kappa * size(self.leaves) / size(self.sigma)
        plus, minus = self._moved(e), self._moved(-e)
        along = (dot(plus, self.sigma) - dot(minus, self.sigma)) / (2 * e)
        pairs = zip(plus, minus, self.slope, strict=True)
        return along, [(p + m - 2 * g) / e**2 for p, m, g in pairs]

    def _moved(self, e: float) -> list[Tensor]:
        before = [w.detach().clone() for w in self.leaves]
        with torch.no_grad():
            for w, s in zip(self.leaves, self.sigma, strict=True):
                w.add_(s, alpha=e)
        try:
            return self._slope()
        finally:
            with torch.no_grad():
                for w, old in zip(self.leaves, before, strict=True):
                    w.copy_(old)

    def every(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """What is finite of both."""
        for side in (self.nested, *(partial(self.difference, kappa) for kappa in DIFFERENCES)):
            try:
                trace, slope = side()
            except (RuntimeError, NotImplementedError, Unusable):
                continue
            if trace.isfinite() and all(g.isfinite().all() for g in slope):
                yield trace, slope


def found(sample: Sample, kappa: float, engine: str) -> tuple[Tensor, list[Tensor]]:
    options = {"kappa": kappa} if engine == "difference" else {}
    _, trace = seht.loss_and_trace(
        sample, sample.closure, params="*", seed=SEED, engine=engine, **options
    )
    return trace.detach(), gradient(trace, list(sample.weights))


def away(ours: tuple[Tensor, list[Tensor]], right: tuple[Tensor, list[Tensor]], floor: float):
    """In units of the bound."""
    gap = size([a - b for a, b in zip(ours[1], right[1], strict=True)])
    parts = (
        abs(ours[0].item() - right[0].item()) / (BOUND * abs(right[0].item()) + floor),
        gap / (BOUND * size(right[1]) + floor),
    )
    return math.inf if any(map(math.isnan, parts)) else max(parts)


def compare(op: Any, sample: Any, engine: str = "difference") -> str:
    """``"right"``, ``"refused ..."`` or ``"wrong ..."``; raises :class:`Unusable`."""
    program = Sample(op, sample)
    sides = Sides(program)
    floor = 1e-6 * size(sides.slope) + 1e-9
    truths, best, said = list(sides.every()), math.inf, ""
    if not truths:
        raise Unusable("there is no second derivative at this point")
    for attempt in attempts(program, engine):
        try:
            ours = attempt()
        except Exception as error:
            kind = "refused" if refusal(error) else f"wrong: {type(error).__name__}"
            return f"{kind}: {str(error).splitlines()[0][:200]}"
        for right in truths:
            gap = away(ours, right, floor)
            if gap < best:
                best = gap
                said = f"{ours[0]:.6g}, not {right[0]:.6g}; gradient {size(ours[1]):.6g}, "
                said += f"not {size(right[1]):.6g}"
            if best < 1:
                return "right"
    return f"wrong: {best:.3g} bounds away, {said}"


def attempts(sample: Sample, engine: str) -> Iterator[Callable[[], tuple[Tensor, list[Tensor]]]]:
    """At several steps; last without the error of order e^2."""
    if engine != "difference":
        yield lambda: found(sample, 0.0, engine)
        return
    for kappa in KAPPAS:
        yield lambda: found(sample, kappa, engine)
    for kappa in (1e-4, 1e-5):
        yield lambda: extrapolated(sample, kappa)


def extrapolated(sample: Sample, kappa: float) -> tuple[Tensor, list[Tensor]]:
    (one, fine), (two, coarse) = (found(sample, k, "difference") for k in (kappa, 2 * kappa))
    return (4 * one - two) / 3, [(4 * f - c) / 3 for f, c in zip(fine, coarse, strict=True)]
