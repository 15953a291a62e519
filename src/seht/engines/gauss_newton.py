r"""The Gauss-Newton trace by differences: two plain steps, SAM's price.

:math:`\mathrm{tr}(G) = E[z'^T H_{out} z']` with :math:`z' = J\sigma`, the derivative of the
network's outputs along the probe: :math:`z' \approx (z(w + e\sigma) - z(w)) / e` with every
decision frozen. The loss's curvature in z is exact, and its own dependence on z is part of the
gradient:

.. math::

    d(z'^T H z') = 2 (H z') \cdot (dz_+ - dz) / e + \partial_z (z'^T H z') \cdot dz .

One perturbed pass leaves an error of first order in e, odd in :math:`\sigma`, so that it vanishes
in expectation; ``two_sided`` makes it second order for one and a third more passes. G is positive
semi-definite, and the trace never negative, only where the loss is convex in the outputs. Terms
that reach the weights past the outputs (an L2 term in the closure) add nothing to G.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from seht.curvature.output_curvature import Curvature, OutputCurvature
from seht.engines.looks import compared
from seht.engines.step_plan import StepPlan
from seht.replay.passes import Passes
from seht.task import Directions, Estimate, check_loss, split
from seht.tensors.gradients import Gradient, add, left_out, times
from seht.tensors.graph import Stored, leaves_of


def gauss_newton(
    passes: Passes, plan: StepPlan, *, lean: bool, two_sided: bool, looked: set[frozenset[str]]
) -> Estimate:
    """The mean over the probes, with 1 + K passes (lean: one more forward pass); with a look at
    whether the loss is curved, unless one of its make was ``looked`` at.
    """
    task, loss = passes.task, passes.loss
    assert passes.boundary is not None
    plain, z = passes.apart()
    curvature = Curvature(plain, z)
    passes.boundary.check(curvature.curved)
    behind = {id(leaf) for leaf in leaves_of([plain], 0, stop=z)[0]}
    passes.refuse_behind(behind)
    curvature.look(looked, third=task.differentiable)
    passes.tied = [n for n, w in passes.used.items() if id(w) in behind]
    scale = task.estimator.scale / task.estimator.probes
    value = loss.detach().new_zeros(())
    total: Gradient = []
    cotangents: list[Tensor] = []
    searching = plan.check
    for sigma in task.probes(frugal=lean):
        if searching:
            searching = False
            compare = partial(_compare, passes, sigma, curvature, z, two_sided)
            plan.search(passes, sigma, compare, 2.0 if two_sided else 1.0, 1.0)
        e = plan.length(passes, sigma)
        found, part, pulls = _probe(passes, sigma, e, curvature, z, two_sided)
        value = value + scale * found.value
        total = add(total, part if scale == 1 else times(part, scale))
        pulls = pulls if scale == 1 else [scale * p for p in pulls]
        cotangents = [c + p for c, p in zip(cotangents, pulls, strict=False)] or pulls
    trace, mean = passes.over_ranks(value, loss.detach(), partial=False)
    whole = None
    if lean and task.apart:
        loss = passes.handed_out(mean, _apart(passes, total, cotangents))
        trace = passes.handed_out(trace, total)
    elif lean:
        loss = mean
        factor = task.coefficient(loss, trace).to(loss.dtype)
        if task.skip:
            total = left_out(total, trace)
            cotangents = [torch.where(trace.isfinite(), c, 0.0) for c in cotangents]
        # The network's graph was dropped at the boundary: the centre runs once more for it.
        with passes.at(None) as output:
            again = check_loss(split(output)[0])
            roots = [again, *passes.boundary.outputs]
            pulls = [torch.ones_like(again), *(factor * c for c in cotangents)]
            total = times(total, factor)
            passes.pull_into(total, roots, pulls)
        whole = passes.handed_out(loss + factor * trace, total)
    elif task.differentiable and passes.hooked:  # past the hooks: nothing through their graph
        total = add(total, passes.pull(z, cotangents, keep=passes.older))
        [loss], inputs = passes.ends([loss])
        trace = Stored.apply(value, total, [1.0] * len(total), *inputs)
    elif task.differentiable:
        ones = [1.0] * (len(z) + len(total))
        [loss, *z], inputs = passes.ends([loss, *z])
        trace = Stored.apply(value, [*cotangents, *total], ones, *z, *inputs)
    return Estimate(loss, trace, passes.output, passes.unused, total=whole)


def _apart(passes: Passes, total: Gradient, cotangents: list[Tensor]) -> Gradient:
    """The loss's gradient; that of the trace is completed in ``total``. Both want the centre, whose
    graph was dropped at the boundary.
    """
    with passes.at(None) as output:
        loss = check_loss(split(output)[0])
        own = passes.pull([loss], None, keep=passes.lasting or passes.older)
        if passes.lasting:
            passes.pull_into(total, passes.boundary.outputs, cotangents)  # type: ignore[union-attr]
            return own
    with passes.at(None):
        passes.pull_into(total, passes.boundary.outputs, cotangents)  # type: ignore[union-attr]
    return own


def _probe(
    passes: Passes,
    sigma: Directions,
    e: Tensor,
    curvature: Curvature,
    z: list[Tensor],
    two_sided: bool,
) -> tuple[OutputCurvature, Gradient, list[Tensor]]:
    """One probe: the value, the perturbed passes' gradient, the cotangents of the centre."""
    width = e
    below = [part.detach() for part in z]
    if two_sided:
        width = 2 * e
        below = [part.detach() for part in _outputs(passes, sigma, -e)]
    with passes.at(sigma, e):
        above = list(passes.boundary.outputs)  # type: ignore[union-attr]
        # Logits may be the largest tensors of all: every pass over them, and every new one, counts.
        direction = [
            (a.detach() - b).div_(width.to(a.dtype)) for a, b in zip(above, below, strict=True)
        ]
        with passes.weights.back(sigma, e, passes.tied):  # a weight that the loss uses, too
            found = curvature.along(direction)
        factors = [h * (2 / width).to(h.dtype) for h in found.product]
        part = passes.pull(above, factors, keep=passes.older)
        del above
    part = add(part, passes.by_place(found.beyond))
    if two_sided:
        with passes.at(sigma, -e):
            minus = list(passes.boundary.outputs)  # type: ignore[union-attr]
            passes.pull_into(part, minus, [-f for f in factors])
            del minus
        return found, part, found.third
    return found, part, [t - f for t, f in zip(found.third, factors, strict=True)]


def _outputs(passes: Passes, sigma: Directions, e: Tensor) -> list[Tensor]:
    with passes.at(sigma, e):
        return [part.detach() for part in passes.boundary.outputs]  # type: ignore[union-attr]


def _compare(
    passes: Passes,
    sigma: Directions,
    curvature: Curvature,
    z: list[Tensor],
    two_sided: bool,
    e: Tensor,
) -> list[Tensor]:
    """What the gradients at e/2, e and 2e say: the numbers of a :class:`Look`."""
    found = []
    for factor in (0.5, 1.0, 2.0):
        _, part, pulls = _probe(passes, sigma, factor * e, curvature, z, two_sided)
        found.append(passes.sketch(add(part, passes.pull_centre(z, pulls))))
    slopes = passes.sketch(passes.pull_centre(z, curvature.slopes()))
    *sizes, whole = passes.sizes(*compared(found, 2.0 if two_sided else 1.0), slopes)
    return [*sizes, passes.task.weight * sizes[2] / whole, torch.zeros_like(whole)]
