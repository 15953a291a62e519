r"""Shared probes: one direction for all examples of a micro-batch (Hutchinson's estimator).

.. math:: \mathrm{tr}(H) = E[s^T H s], \qquad s^T H s \approx s \cdot (g(w + es) - g(w - es)) / 2e

by ordinary gradients with every decision frozen, so that it is right through any operator and for
losses whose examples are coupled (train-mode BatchNorm, contrastive losses). Layer l's share is
:math:`s_l \cdot (Hs)_l`, whose expectation is :math:`\mathrm{tr}(H_{ll})`. For the Gauss-Newton
matrix :math:`z'^T H_{out} z'` with :math:`z' = Js` by a symmetric difference of the outputs, and
:math:`s_l \cdot (J^T H_{out} z')_l` for a layer.

Hutchinson, Communications in Statistics 19 (1990); frozen decisions: ``docs/engines.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seht.engines.base import Directions, Task
from seht.engines.curved import curve, slope
from seht.engines.graph import leaves_of
from seht.engines.passes import Gradient, Passes
from seht.engines.state import uninterrupted
from seht.engines.steps import START
from seht.estimators import SehtH
from seht.measure.problem import Problem


@dataclass(frozen=True)
class Replicates:
    """What a micro-batch gave."""

    values: Tensor
    """float64, ``(replicates, 1 + layers)``: the trace, then each layer's share (if asked for)."""
    loss: float
    unused: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    """Tensors that had one direction for all examples."""
    step_error: float | None = None


def replicates(
    problem: Problem, batch: Any, count: int, seed: int, *, per_layer: bool, check: bool
) -> Replicates:
    """``count`` independent estimates of the trace of a batch's loss.

    With ``check`` the first of them is also made with twice the step, which shows the error of the
    differences.
    """
    tensors = problem.chosen.tensors
    task = Task(
        problem.model,
        problem.closure(batch),
        tensors,
        tuple(range(len(tensors))),
        problem.chosen.named,
        len(tensors),
        SehtH(probes=count),
        seed,
        curvature=problem.curvature,
        boundary=problem.boundary,
        differentiable=False,
    )
    with torch.enable_grad(), uninterrupted():
        passes = Passes(task, watch=check)
        loss = float(passes.loss.detach())
        if not passes.used:
            raise ValueError(
                "the loss depends on none of the chosen parameters; loss_fn must compute it with "
                "the model it is given"
            )
        kappa = START[problem.curvature, problem.weights[0].dtype]
        ggn = problem.curvature == "ggn"
        probe = _gauss_newton(passes, per_layer) if ggn else _hessian(passes)
        rows, error = [], None
        for sigma in task.probes():
            e = passes.weights.step(sigma, kappa)
            rows.append(probe(sigma, e))
            if check and error is None:
                far = probe(sigma, 2 * e)
                # The error grows like e^2: three times that of the smaller step lies between them.
                error = float((far[0] - rows[0][0]).abs() / 3 / rows[0][0].abs().clamp(min=1e-300))
    values = torch.stack(rows)
    return Replicates(
        values if per_layer else values[:, :1], loss, passes.unused, tuple(tensors), error
    )


Probe = Callable[[Directions, Tensor], Tensor]


def _hessian(passes: Passes) -> Probe:
    passes.loss, passes.output = passes.loss.detach(), None  # the centre's graph may go

    def probe(sigma: Directions, e: Tensor) -> Tensor:
        above = passes.gradient(sigma, e)
        below = passes.gradient(sigma, -e)
        return _shares(passes, sigma, above, below) / (2 * e)

    return probe


def _gauss_newton(passes: Passes, per_layer: bool) -> Probe:
    assert passes.boundary is not None
    z = list(passes.boundary.outputs)
    gradient, curved = slope(passes.loss, z) if z else ([], False)
    passes.boundary.check(curved)
    behind = {id(leaf) for leaf in leaves_of([passes.loss], 0, stop=z)[0]}
    passes.tied = [n for n, w in passes.used.items() if id(w) in behind]

    def outputs(sigma: Directions, e: Tensor) -> list[Tensor]:
        with passes.at(sigma, e):
            return [part.detach() for part in passes.boundary.outputs]  # type: ignore[union-attr]

    def probe(sigma: Directions, e: Tensor) -> Tensor:
        above, below = outputs(sigma, e), outputs(sigma, -e)
        direction = [(a - b) / (2 * e).to(a.dtype) for a, b in zip(above, below, strict=True)]
        found = curve(gradient, z, direction)
        if per_layer:
            return _shares(passes, sigma, passes.pull(z, found.product, keep=True))
        return found.value.double().reshape(1)

    return probe


def _shares(
    passes: Passes, sigma: Directions, above: Gradient, below: Gradient | None = None
) -> Tensor:
    """The whole, then for each tensor s_l . (a - b)_l."""
    by_id: dict[int, Tensor] = {}
    for i, leaf in enumerate(passes.leaves):
        a, b = above[i], None if below is None else below[i]
        if a is not None:
            by_id[id(leaf)] = a if b is None else a - b
    zero = passes.loss.detach().new_zeros((), dtype=torch.float64)
    parts = [
        (by_id[id(w)] * sigma[name]).sum(dtype=torch.float64) if id(w) in by_id else zero
        for name, w in passes.task.weights.items()
    ]
    return torch.stack([torch.stack(parts).sum(), *parts])
