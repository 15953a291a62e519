r"""The fast engine: symmetric differences of ordinary gradients, every decision frozen.

With :math:`w_\pm = w \pm e\sigma`,

.. math::

    t = \sigma^T H \sigma \approx \sigma \cdot (g(w_+) - g(w_-)) / 2e, \qquad
    \nabla t \approx (g(w_+) + g(w_-) - 2 g(w)) / e^2 ,

both with an error of order :math:`e^2`: three plain steps, and nothing but first derivatives,
which every operator has right. The centre pass records each decision and the perturbed passes
replay it (``replay/``, ``operators/``); without that the difference of a ReLU network is another
object, whatever the step. The Gauss-Newton trace is in ``gauss_newton.py``.

Two forms. *Scalar*: the centre's graph waits for the user's ``backward()``. *Lean*: every pass is
differentiated at once and one graph lives at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seht.curvature import head_rules
from seht.curvature.unformed import KeepLogits
from seht.distributed import LOCAL, Ranks
from seht.engines.gauss_newton import gauss_newton
from seht.engines.step_size import DrawSteps, StepControl, StepPlan
from seht.errors import check_positive
from seht.operators.rules import KeepGraph
from seht.persample.memory import Memory
from seht.precision.policy import Precision, check_precision, prepared
from seht.replay.centre import Logits, Plan
from seht.replay.closures import alone
from seht.replay.leaves import refuse_lost
from seht.replay.passes import Passes
from seht.task import Directions, Estimate, Task, check_loss, split
from seht.tensors.gradients import Gradient, Stored, add, left_out, times
from seht.tensors.graph import hooks_of
from seht.tensors.process import lasting_graphs, own_gradients
from seht.tensors.undo import uninterrupted


class DifferenceEngine:
    """Right through any operator with an ordinary gradient; three plain steps per probe."""

    name = "difference"

    def __init__(
        self,
        *,
        kappa: float | None = None,
        two_sided: bool = False,
        precision: str = "full",
    ) -> None:
        check_positive("kappa", kappa, optional=True)
        self.steps = StepControl(kappa=kappa, fixed=kappa is not None)
        self.draws = DrawSteps()
        """The steps of each set of tensors, if not all of them are drawn (SEHT-D)."""
        self.two_sided = two_sided
        self.precision = check_precision(precision)
        self.memory = Memory()
        """With per-sample probes: what is known about where the examples lie."""
        self._looked: set[frozenset[str]] = set()
        """For the Gauss-Newton trace: the makes of loss whose curvature was looked at."""
        self._logits: Logits = "unformed"
        """Which large logits the closure was seen to need."""
        self._whole = False
        """Whether the closure was seen to use the centre's graph, which the lean form drops."""

    def estimate(
        self, task: Task, ranks: Ranks = LOCAL, *, lean: bool = False, watch: bool = False
    ) -> Estimate:
        """Loss and trace; the perturbed passes are differentiated here, one graph at a time.

        ``ranks`` are those of the task's model. ``lean`` asks for ``total`` instead of a waiting
        graph; ``watch`` lets the engine check its step every so often.
        """
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            uninterrupted(),
            alone(task.weights.values()),
            own_gradients(),
            lasting_graphs(),
            ranks.estimating(task.weights),
            prepared(task, self.precision) as (task, precision),
        ):
            steps = StepPlan(task, self.steps, self.draws, check=watch)
            plan = self._plan(task, precision, ranks, lean=lean, check=steps.check)
            while True:
                try:
                    passes, found = self._run(plan, ranks, steps)
                    break
                except KeepLogits:  # the closure looks at its logits: let it have them
                    apart = plan.ggn and not plan.lean and plan.logits == "unformed"
                    self._logits = "centre" if apart else "formed"
                    plan = replace(plan, logits=self._logits)
                    steps = StepPlan(task, self.steps, self.draws, check=watch)
        if not task.differentiable:
            found = replace(found, loss=found.loss.detach(), trace=found.trace.detach())
        return replace(
            found,
            output=precision.given_out(found.output),
            shared=passes.shared,
            own=passes.own,
            commit=precision.committing(passes.commit),
            learn=partial(self._learn, steps),
        )

    def _plan(
        self, task: Task, precision: Precision, ranks: Ranks, *, lean: bool, check: bool
    ) -> Plan:
        """The plan of the passes; with ``check`` they compare steps."""
        prefix = not check and _pays(task) and ranks.keeps_graphs
        formed = prefix or task.examples is not None or not ranks.keeps_graphs
        formed = formed or not _has_large_head(task)
        if task.curvature == "ggn":
            formed = formed or self.two_sided or not task.differentiable
        whole = Plan(
            task,
            precision,
            self.memory,
            prefix=prefix,
            watch=check or self.steps.uses < 2,
            logits="formed" if formed else self._logits,
        )
        # A shared prefix needs the centre's graph, and so does a penalty that may be left out.
        lean = lean and not prefix and not whole.held
        if ranks.keeps_graphs:
            lean = lean and not task.skip and not self._whole and not hooks_of(task.modules)
        if whole.logits == "centre" and (lean or not whole.ggn):
            whole = replace(whole, logits="formed")  # its last pass has none of the centre's
        return replace(whole, lean=True) if lean else whole

    def _run(self, plan: Plan, ranks: Ranks, steps: StepPlan) -> tuple[Passes, Estimate]:
        try:
            passes = ranks.passes(plan)
        except KeepGraph:  # the closure uses its graph: hooks on it, a gradient from it
            plan, self._whole = replace(plan, lean=False), True
            passes = ranks.passes(plan)
        passes.refuse_hooks()
        if not passes.used:
            return passes, _nothing_used(passes, plan.lean)
        dtype = next(iter(passes.used.values())).dtype
        steps.start(plan.task.curvature, plan.precision.effective(dtype, passes.coarsest))
        sided, looked = self.two_sided, self._looked
        try:
            if not plan.ggn:
                return passes, hessian(passes, steps, lean=plan.lean)
            found = gauss_newton(passes, steps, lean=plan.lean, two_sided=sided, looked=looked)
        except KeepLogits:
            passes.rewind()
            raise
        return passes, found

    def _learn(self, plan: StepPlan) -> float | None:
        self.steps, self.draws, error = plan.learn()
        return error

    @property
    def kappa(self) -> float | None:
        """The relative step, as far as it has adapted."""
        return self.steps.kappa

    def state(self) -> dict[str, Any]:
        """The adapted step, for ``state_dict``."""
        return {**self.steps.state(), "draws": self.draws.state()}

    def back(self) -> Callable[[], None]:
        """A function that restores the present steps."""
        steps, draws = self.steps, self.draws

        def back() -> None:
            self.steps, self.draws = steps, draws

        return back

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue with the saved step, unless the user gave one."""
        self.steps = StepControl.of(state).go_on(self.steps)
        self.draws = DrawSteps.of(state["draws"]) if "draws" in state else DrawSteps()


def _pays(task: Task) -> bool:
    """Whether enough comes before the first drawn tensor to keep it for the perturbed passes."""
    return len(task.weights) < task.count and task.indices[0] >= task.count / 5


def _has_large_head(task: Task) -> bool:
    """Whether a parameter may be the weight of a head whose logits are not formed."""
    least = head_rules.WORTH[1]
    return any(w.dim() == 2 and w.shape[0] > least * w.shape[1] for w in task.parameters)


def _nothing_used(passes: Passes, lean: bool) -> Estimate:
    """If the loss depends on none of the drawn tensors: its own gradient, and a trace of 0."""
    loss = passes.loss
    zero = loss.detach().new_zeros(())
    if not lean:
        [loss], _ = passes.ends([loss])
        return Estimate(loss, zero, passes.output, passes.unused)
    if passes.boundary is None:
        gradient = passes.centre_gradient(keep=False)
    else:  # the network's graph was dropped at the boundary
        with passes.at(None, formed=True) as output:
            gradient = passes.leaves.pull([check_loss(split(output)[0])], None, keep=passes.older)
    zero, loss = passes.over_ranks(zero, loss.detach(), partial=True)
    whole = passes.leaves.handed_out(loss, gradient)
    if passes.task.apart:
        return Estimate(whole, zero, passes.output, passes.unused)
    return Estimate(loss, zero, passes.output, passes.unused, total=whole)


def hessian(passes: Passes, plan: StepPlan, *, lean: bool) -> Estimate:
    """The mean over the probes, with 1 + 2K passes."""
    task, loss = passes.task, passes.loss
    scale = task.estimator.scale / task.estimator.probes
    early = lean or plan.check or (passes.hooked and task.differentiable)
    centre = passes.centre_gradient(keep=not lean) if early else None
    value = loss.new_zeros((), dtype=torch.float64)
    pull = torch.zeros_like(value)
    unit, total = pull, Gradient()
    searching = plan.check
    # With one probe and a known coefficient the parts are folded into one gradient as they come.
    fold = lean and task.constant and task.estimator.probes == 1 and not task.apart
    for sigma in task.probes(frugal=lean):
        if searching:
            searching = False
            assert centre is not None
            # Where each gradient has noise of length 1, g(w+) + g(w-) - 2 g(w) has the root of 6:
            # in squares the centre has 4 parts of it.
            noise = {"noise": 6**0.5, "common": 2 / 3}
            middle = passes.leaves.sketch(centre)
            gradient = partial(_gradient, passes, sigma, centre, middle)
            plan.search(passes, sigma, gradient, lambda: middle, 2.0, 2.0, **noise)
        e = plan.length(passes, sigma)
        unit = scale / e**2
        pull -= 2 * unit
        if fold:
            total, centre = times(centre or [], 1 + task.weight * pull), None
        both: Gradient = []
        with passes.weights.away():
            half = scale / (2 * e)
            for side, part in ((e, half), (-e, -half)):
                into, factor = (total, task.weight * unit) if fold else (both, None)
                along = passes.gradient(sigma, side, into, factor)
                value += torch.stack(list(along.values())).sum() * part
        if task.estimator.probes > 1:  # each probe has its own step
            both, unit = times(both, unit), torch.ones_like(unit)
        total = add(total, both)
    whole = None
    value, mean = passes.over_ranks(value, loss.detach(), partial=True)
    trace = value.to(loss.dtype)
    if lean and task.apart:
        loss = passes.leaves.handed_out(mean, centre or [])
        trace = passes.leaves.handed_out(trace, add(times(total, unit), times(centre or [], pull)))
    elif lean:
        loss = mean
        factor = task.coefficient(loss, trace)
        if not fold:
            total = times(total, factor * unit)
            if task.skip:
                total, pull = left_out(total, trace), torch.where(trace.isfinite(), pull, 0.0)
            total = add(total, times(centre or [], 1 + factor * pull))
        whole = passes.leaves.handed_out(loss + factor * trace, total)
    elif task.differentiable and passes.hooked:  # past the hooks: nothing through their graph
        total = add(times(total, unit), times(centre or [], pull))
        [loss], inputs = passes.ends([loss])
        trace = Stored.apply(trace, total, [1.0] * len(total), *inputs)
    elif task.differentiable:
        units = [unit] * len(total)
        [loss], inputs = passes.ends([loss])
        trace = Stored.apply(trace, [1, *total], [pull, *units], loss, *inputs)
    return Estimate(loss, trace, passes.output, passes.unused, total=whole)


def _gradient(
    passes: Passes, sigma: Directions, centre: Gradient, middle: Tensor, step: Tensor
) -> Tensor:
    """A sketch of the gradient of the trace that this step gives; ``middle`` is the centre's."""
    both: Gradient = []
    for side in (step, -step):
        passes.gradient(sigma, side, both)
    refuse_lost(centre, both)
    return (passes.leaves.sketch(both) - 2 * middle) / step**2
