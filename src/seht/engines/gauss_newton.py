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

Where the loss is cross-entropy of the logits of a linear head, a perturbed pass does not form
these; the centre keeps them, and nothing else of their size, but for the trace's cotangents that
wait for the user's backward pass in the scalar form (``curvature/head_loop.py``).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from seht.curvature import head_loop
from seht.curvature.head_loop import HeadGradient, KeptLogits
from seht.curvature.output_curvature import Curvature
from seht.curvature.unformed import Unformed
from seht.engines.head_sides import LoopedHead, OutputSide, Probed, WaitingHead, through
from seht.engines.step_size import StepPlan
from seht.replay.passes import Passes
from seht.task import Directions, Estimate, check_loss, split
from seht.tensors.gradients import Gradient, Stored, add, left_out, times
from seht.tensors.graph import leaves_of


def gauss_newton(
    passes: Passes, plan: StepPlan, *, lean: bool, two_sided: bool, looked: set[frozenset[str]]
) -> Estimate:
    """The mean over the probes, with 1 + K passes (lean: one more forward pass); with a look at
    whether the loss is curved, unless one of its make was ``looked`` at.
    """
    task = passes.task
    assert passes.boundary is not None
    scale = task.estimator.scale / task.estimator.probes
    side: OutputSide
    if passes.terms is None:
        side = _Whole(passes, two_sided, looked)
    elif passes.losses is not None and passes.losses.ends:
        side = WaitingHead(passes)
    else:
        # The loss's own gradient comes with that of the trace, if its share is known.
        weight = task.weight * scale if task.constant and not task.apart else 0.0
        side = LoopedHead(passes, weight)
    if lean:  # what the curvature needs of the loss's graph it keeps
        passes.forget()
    loss = passes.loss
    value = loss.detach().new_zeros(())
    total: Gradient = []
    cotangents: list[Tensor] = []
    searching = plan.check
    for sigma in task.probes(frugal=lean):
        if searching:
            searching = False
            gradient, slope = partial(_gradient, passes, side, sigma), partial(_slope, passes, side)
            plan.search(passes, sigma, gradient, slope, 2.0 if two_sided else 1.0, 1.0)
        e = plan.length(passes, sigma)
        found, part, pulls = side.probe(sigma, e)
        value = value + scale * found
        total = add(total, part if scale == 1 else times(part, scale))
        pulls = pulls if scale == 1 else [scale * p for p in pulls]
        cotangents = [c + p for c, p in zip(cotangents, pulls, strict=False)] or pulls
        del part, pulls  # of the size of weights and logits
    trace, mean = passes.over_ranks(value, loss.detach(), partial=False)
    whole = None
    if lean:
        side.forget()
    if lean and task.apart:
        loss = passes.leaves.handed_out(mean, _apart(passes, side, total, cotangents))
        trace = passes.leaves.handed_out(trace, total)
    elif lean:
        loss = mean
        factor = task.coefficient(loss, trace).to(loss.dtype)
        if task.skip:
            total = left_out(total, trace)
            cotangents = [torch.where(trace.isfinite(), c, 0.0) for c in cotangents]
        total = times(total, factor)
        cotangents = [factor * c for c in cotangents]
        # The network's graph was dropped at the boundary: the centre runs once more for it.
        with passes.at(None) as output:
            again = check_loss(split(output)[0])
            total, cotangents = side.with_slope(total, cotangents)
            roots = [again, *side.roots()]
            passes.leaves.pull_into(total, roots, [torch.ones_like(again), *cotangents])
        whole = passes.leaves.handed_out(loss + factor * trace, total)
    elif task.differentiable and passes.hooked:  # past the hooks: nothing through their graph
        total = add(total, passes.leaves.pull(side.ends(), cotangents, keep=passes.older))
        [loss], inputs = passes.ends([loss])
        trace = Stored.apply(value, total, [1.0] * len(total), *inputs)
    elif task.differentiable:
        [loss, *z], inputs = passes.ends([loss, *side.ends()])
        ones = [1.0] * (len(z) + len(total))
        trace = Stored.apply(value, [*cotangents, *total], ones, *z, *inputs)
    passes.boundary.forget()
    return Estimate(loss, trace, passes.output, passes.unused, total=whole)


def _apart(passes: Passes, side: OutputSide, total: Gradient, cotangents: list[Tensor]) -> Gradient:
    """The loss's gradient; that of the trace is completed in ``total``. Both want the centre, whose
    graph was dropped at the boundary.
    """
    both = passes.lasting
    with passes.at(None) as output:
        loss = check_loss(split(output)[0])
        own, pulls = side.with_slope([], [])
        roots = [loss, *(side.roots() if pulls else [])]
        keep = both or passes.older
        own = add(own, passes.leaves.pull(roots, [torch.ones_like(loss), *pulls], keep=keep))
        if both:
            passes.leaves.pull_into(total, side.roots(), cotangents)
            return own
    with passes.at(None):
        passes.leaves.pull_into(total, side.roots(), cotangents)
    return own


class _Whole(OutputSide):
    """Outputs that the centre has kept."""

    def __init__(self, passes: Passes, two_sided: bool, looked: set[frozenset[str]]) -> None:
        assert passes.boundary is not None
        self._passes, self._boundary = passes, passes.boundary
        self._two_sided = two_sided
        loss, z = passes.apart()
        self._z, self._curvature = z, Curvature(loss, z)
        self._boundary.check(self._curvature.curved)
        behind = {id(leaf) for leaf in leaves_of([loss], stop=z)}
        passes.tie(behind)
        self._curvature.look(loss, looked, third=passes.task.differentiable)

    def roots(self) -> list[Tensor]:
        """The outputs."""
        return list(self._boundary.outputs)

    def ends(self) -> list[Tensor]:
        """The centre's."""
        return self._z

    def forget(self) -> None:
        """The centre's outputs, and the curvature in them."""
        del self._z, self._curvature

    def slopes(self) -> tuple[Gradient, list[Tensor]]:
        """dL/dz."""
        return [], self._curvature.slopes()

    def probe(self, sigma: Directions, e: Tensor, *, alone: bool = False) -> Probed:
        """With all outputs, or a head a few rows at a time."""
        passes, width = self._passes, e
        below = [part.detach() for part in self._z]
        if self._two_sided:
            width = 2 * e
            with passes.at(sigma, -e):
                below = [part.detach() for part in self._boundary.outputs]
        with passes.at(sigma, e):
            above = self.roots()
            looped = self._looped(above, e)
            if looped is not None:
                return looped
            above = [a.form("the trace") if isinstance(a, Unformed) else a for a in above]
            with passes.weights.back(sigma, e, passes.tied):  # a weight that the loss uses, too
                found = self._curvature.along(above, below, width)
            part = passes.leaves.pull(above, found.pulls, keep=passes.older)
            del above
        part = add(part, passes.leaves.by_place(found.beyond))
        if self._two_sided:
            with passes.at(sigma, -e):
                minus = self.roots()
                passes.leaves.pull_into(part, minus, [-f for f in found.pulls])
                del minus
            return found.value, part, found.third
        return found.value, part, [t - f for t, f in zip(found.third, found.pulls, strict=True)]

    def _looped(self, above: list[Tensor], e: Tensor) -> Probed | None:
        """If the perturbed pass has not formed its logits."""
        terms = self._curvature.cross_entropies
        if len(above) != 1 or not isinstance(above[0], Unformed) or above[0].looks or not terms:
            return None
        if any(term.dim != above[0].rows.dim for term in terms):
            return None
        there = HeadGradient(above[0].head)
        places = above[0].rows.places.flatten().to(e.device)
        centre = KeptLogits(self._z[0], terms[0].dim)
        value = torch.stack(
            [head_loop.run(term, centre, there, places, e, 0.0) for term in terms]
        ).sum()
        return value, through(self._passes, there), [centre.cotangents()]


def _gradient(passes: Passes, side: OutputSide, sigma: Directions, step: Tensor) -> Tensor:
    """A sketch of the gradient of the trace that this step gives."""
    _, part, pulls = side.probe(sigma, step, alone=True)
    return passes.leaves.sketch(add(part, side.pulled(pulls)))


def _slope(passes: Passes, side: OutputSide) -> Tensor:
    """A sketch of the gradient of the loss."""
    part, pulls = side.slopes()
    return passes.leaves.sketch(add(part, side.pulled(pulls)))
