r"""The fast engine: symmetric differences of ordinary gradients, every decision frozen.

With :math:`w_\pm = w \pm e\sigma`,

.. math::

    t = \sigma^T H \sigma \approx \sigma \cdot (g(w_+) - g(w_-)) / 2e, \qquad
    \nabla t \approx (g(w_+) + g(w_-) - 2 g(w)) / e^2 ,

both with an error of order :math:`e^2`: three plain steps, and nothing but first derivatives,
which every operator has right. The centre pass records each decision and the perturbed passes
replay it (``replay.py``, ``rules.py``, ``kinks.py``); without that the difference of a ReLU network
is another object, whatever the step. The Gauss-Newton trace is in ``ggn.py``.

Two forms. *Scalar*: the centre's graph waits for the user's ``backward()``. *Lean*: every pass is
differentiated at once and one graph lives at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seht.engines.alone import alone
from seht.engines.base import Directions, Estimate, Task, refuse_scripted
from seht.engines.free import noise_stability
from seht.engines.ggn import gauss_newton
from seht.engines.graph import Stored, handed_out
from seht.engines.passes import Gradient, Passes, add, sketch, times
from seht.engines.rules import KeepGraph
from seht.engines.state import RandomState, uninterrupted
from seht.engines.steps import StepControl
from seht.engines.tracking import Memory
from seht.estimators import unknown
from seht.hooks import hooks_of


class DifferenceEngine:
    """Right through any operator with an ordinary gradient; three plain steps per probe."""

    name = "difference"

    def __init__(
        self, *, kappa: float | None = None, two_sided: bool = False, kinks: str = "frozen"
    ) -> None:
        if kappa is not None and not (math.isfinite(kappa) and kappa > 0):
            raise ValueError(f"kappa must be a positive number, not {kappa!r}")
        if kinks not in ("frozen", "free"):
            raise ValueError(unknown("kinks", kinks, ["frozen", "free"]))
        self.kinks = kinks
        self.steps = StepControl(kappa=kappa, fixed=kappa is not None)
        self.two_sided = two_sided
        self.memory = Memory()
        """With per-sample probes: where the examples lie, as far as it is known."""
        self._whole = False
        """Whether the closure was seen to use the centre's graph, which the lean form drops."""

    def estimate(self, task: Task, *, lean: bool = False, watch: bool = False) -> Estimate:
        """Loss and trace; the perturbed passes are differentiated here, one graph at a time."""
        refuse_scripted(task.model, self.name)
        free = self.kinks == "free"
        if free and task.curvature != "hessian":
            raise ValueError("kinks='free' has no curvature='ggn'; leave one of them out")
        if free and task.per_sample:
            raise ValueError("kinks='free' has no estimator='seht-s'; leave one of them out")
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            uninterrupted(),
            alone(task.weights.values()),
        ):
            if free and self.steps.kappa is None and task.weight > 0:
                if not task.constant:
                    raise ValueError(
                        "kinks='free' takes neither limit= nor on_nonfinite='skip': its objective "
                        "is the mean of two losses; leave them out, or give kappa="
                    )
                return noise_stability(task)
            watch = watch and not free and self.steps.due
            prefix = not watch and not free and _pays(task)
            # A shared prefix needs the centre's graph, and so does a penalty that may be left out.
            held = getattr(task.estimator, "coupling", None) == "frozen"
            lean = lean and not prefix and not task.skip and not held
            lean = lean and not self._whole and not hooks_of([task.model])
            options: dict[str, Any] = {
                "frozen": not free,
                "prefix": prefix,
                "watch": not free and (watch or self.steps.uses < 2),
                "memory": self.memory,
            }
            random = RandomState(task.model.parameters())
            start = random.read()
            try:
                passes = Passes(task, lean=lean, **options)
            except KeepGraph:  # the closure uses its graph: hooks on it, a gradient from it
                random.begin(start)
                lean, self._whole = False, True
                passes = Passes(task, **options)
            if passes.hooked and held:
                raise ValueError(
                    "coupling='frozen' sends its gradient through the network's own graph, where "
                    "backward hooks would meet it; remove the hooks, or take coupling='own'"
                )
            if not passes.used:
                loss = passes.loss
                found = Estimate(loss, loss.detach().new_zeros(()), passes.output, passes.unused)
            else:
                dtype = next(iter(passes.used.values())).dtype
                kappa = self.steps.start(task.curvature, dtype)
                if task.curvature == "ggn":
                    found = gauss_newton(
                        passes, kappa, lean=lean, watch=watch, two_sided=self.two_sided
                    )
                else:
                    found = hessian(passes, kappa, lean=lean, watch=watch)
        found.commit = passes.buffers.commit
        found.shared = passes.shared
        if not task.differentiable:
            found.loss, found.trace = found.loss.detach(), found.trace.detach()
        found.learn = self._learn
        return found

    def _learn(self, seen: list[float], orders: tuple[float, float] | None) -> float | None:
        if orders is not None:
            small, large, size, share = seen
            self.steps.learn(small, large, size, *orders, share)
        self.steps.uses += 1
        return self.steps.error

    def state(self) -> dict[str, Any]:
        """The adapted step, for ``state_dict``."""
        return self.steps.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with an adapted step."""
        self.steps = StepControl(**state)


def _pays(task: Task) -> bool:
    """Whether enough comes before the first drawn tensor to keep it for the perturbed passes."""
    return len(task.weights) < task.count and task.indices[0] >= task.count / 5


def hessian(passes: Passes, kappa: float, *, lean: bool, watch: bool) -> Estimate:
    """The mean over the probes, with 1 + 2K passes."""
    task, loss = passes.task, passes.loss
    scale = task.estimator.scale / task.estimator.probes
    early = lean or watch or (passes.hooked and task.differentiable)
    centre = passes.centre_gradient(keep=not lean) if early else None
    value = loss.new_zeros((), dtype=torch.float64)
    pull = torch.zeros_like(value)
    unit, total = pull, Gradient()
    seen: list[Tensor] = []
    # With one probe and a known coefficient the parts are folded into one gradient as they come.
    fold = lean and task.constant and task.estimator.probes == 1
    for sigma in task.probes():
        e = passes.weights.step(sigma, kappa)
        if watch and not seen:
            seen = _compare(passes, sigma, e, centre)
        unit = scale / e**2
        pull -= 2 * unit
        if fold:
            total, centre = times(centre or [], 1 + task.weight * pull), None
        both: Gradient = []
        for side in (e, -e):
            into, factor = (total, task.weight * unit) if fold else (both, None)
            along = passes.gradient(sigma, side, into, factor)
            value += torch.stack(list(along.values())).sum() * (scale / (2 * side))
        if task.estimator.probes > 1:  # each probe has its own step
            both, unit = times(both, unit), torch.ones_like(unit)
        total = add(total, both)
    trace, whole = value.to(loss.dtype), None
    if lean:
        factor = task.coefficient(loss, trace)
        if not fold:
            total = add(times(total, factor * unit), times(centre or [], 1 + factor * pull))
        loss = loss.detach()
        whole = handed_out(loss + factor * trace, total, passes.leaves)
    elif task.differentiable and passes.hooked:  # past the hooks: nothing through their graph
        total = add(times(total, unit), times(centre or [], pull))
        trace = Stored.apply(trace, total, [1.0] * len(total), *passes.inputs)
    elif task.differentiable:
        units = [unit] * len(total)
        trace = Stored.apply(trace, [1, *total], [pull, *units], loss, *passes.inputs)
    orders = (2.0, 2.0) if seen else None
    return Estimate(
        loss, trace, passes.output, passes.unused, total=whole, look=seen, orders=orders
    )


def _compare(passes: Passes, sigma: Directions, e: Tensor, centre: Gradient | None) -> list[Tensor]:
    """Distances of the gradients at (e/2, e) and (e, 2e), their size, and their share."""
    assert centre is not None
    middle = sketch(centre, passes.leaves)
    found = []
    for factor in (0.5, 1.0, 2.0):
        step = factor * e
        both: Gradient = []
        for side in (step, -step):
            passes.gradient(sigma, side, both)
        found.append((sketch(both, passes.leaves) - 2 * middle) / step**2)
    half, one, two = found
    share = passes.task.weight * one.norm() / middle.norm()
    return [(half - one).norm(), (one - two).norm(), one.norm(), share]
