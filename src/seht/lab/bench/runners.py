"""One training step each: a plain one, the penalties, nested autograd on fused operators, SAM, and
a Fisher trace from one sampled label each.

A runner is told which of its random draws comes next (:meth:`Runner.prepare`, not timed) and then
runs forward and backward passes (:meth:`Runner.run`). :meth:`Runner.gradient` is the gradient of
the penalty alone, for the measurements of error and variance.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seht
from seht import probes
from seht.course import make_task
from seht.curvature.boundary import Boundary
from seht.engines import autograd
from seht.estimators import Estimator
from seht.lab.bench.cases import Problem
from seht.lab.methods.terms import fisher_trace
from seht.operators.safe_forms import safe_ops
from seht.replay.state import Weights, norm
from seht.task import Closure, Task

NEVER = 1 << 60
STRATA = 3  # drawn steps of SEHT-D in a round of timing
SHARP = 1e6
"""A weight so large that the loss's own gradient, which is subtracted, hardly matters."""


class Runner:
    """A plain step, and what the others have in common."""

    chance = 1.0
    """The probability that a step draws anything."""

    def __init__(self, problem: Problem, weight: float = 1e-6) -> None:
        self.problem, self.weight, self.draw = problem, weight, 0

    def prepare(self, draw: int) -> None:
        """Choose the next draw; the same number draws the same probes in every runner."""
        self.draw = draw

    def run(self) -> None:
        """Forward and backward passes of one step, into ``.grad``."""
        self.problem.closure().backward()

    def drawn(self, count: int) -> list[int]:
        """The numbers of this many draws that draw something."""
        return list(range(count))

    def plan(self, turn: int) -> list[tuple[float, int]]:
        """Draws to be timed in one round, with weights that sum to 1."""
        return [(1.0, turn)]

    def gradient(self, draw: int) -> Tensor:
        """The gradient of the penalty (weight 1) in all parameters, as one vector."""
        self.prepare(draw)
        self.problem.model.zero_grad()
        self.run()
        return (self._collect() - self._plain_gradient) / self.weight

    @cached_property
    def _plain_gradient(self) -> Tensor:
        self.problem.model.zero_grad()
        self.problem.closure().backward()
        return self._collect()

    def _collect(self) -> Tensor:
        parts = [
            torch.zeros_like(p) if p.grad is None else p.grad
            for p in self.problem.model.parameters()
        ]
        return torch.cat([part.flatten() for part in parts])


class Penalty(Runner):
    """:class:`seht.HessianTrace` in one of its two forms."""

    def __init__(
        self,
        problem: Problem,
        weight: float = 1e-6,
        *,
        lean: bool = False,
        quarter: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(problem, weight)
        self.penalty = seht.HessianTrace(problem.model, weight=weight, seed=0, **options)
        self._estimator: Any = self.penalty.estimator
        self.lean, self.quarter = lean, quarter
        self.on: Closure | None = None
        self.chance = 1.0 - self._undrawn

    def prepare(self, draw: int) -> None:
        """Go to that step of the penalty's schedule; its seed and number determine the probe."""
        self.penalty.load_state_dict({**self.penalty.state_dict(), "calls": draw})
        self.on = self.problem.quarter(draw) if self.quarter else None

    def run(self) -> None:
        if self.lean:
            self.penalty.backward(self.problem.closure, on=self.on)
        else:
            self.penalty(self.problem.closure, on=self.on).backward()

    # The engine compares steps on first use and every so often. Timed steps are those in between.

    @property
    def _steps(self) -> dict[str, Any]:
        """What the engine remembers of its steps; nothing where it compares none."""
        found: dict[str, Any] = self.penalty.state_dict()["engine"]
        return found

    def _set(self, **steps: int) -> bool:
        if not self._steps:
            return False
        state = self.penalty.state_dict()
        self.penalty.load_state_dict({**state, "engine": {**state["engine"], **steps}})
        return True

    def steady(self) -> bool:
        """No more checks from now on; whether the engine would have made any."""
        return self._set(uses=max(2, self._steps.get("uses", 0)), next_check=NEVER)

    def check_next(self) -> bool:
        """Let the next step be one with a check, if the engine has such."""
        return self._set(next_check=0)

    def settle(self, most: int = 8) -> None:
        """Let the engine find its step, as it would in the first steps of training."""
        for draw in self.drawn(most):
            steps = self._steps
            if not steps or steps["uses"] < steps["next_check"]:
                break
            self.gradient(draw)
            if self._steps["next_check"] == steps["next_check"]:  # nothing was checked
                break
        self.steady()

    # SEHT-D: most steps draw nothing, and the others cost the more the earlier the first layer is
    # that they draw. Both are known before a step is run.

    @cached_property
    def _count(self) -> int:
        return len(probes.choose(self.problem.model).tensors)

    @property
    def _undrawn(self) -> float:
        keep = self._estimator.keep if isinstance(self._estimator, seht.SehtD) else 1.0
        return float((1 - keep) ** self._count)

    def drawn(self, count: int, shift: float = 0.5) -> list[int]:
        """So many draws with a layer in them, spread evenly over the order of their first layer."""
        if self._undrawn == 0:
            return list(range(count))
        _, ordered = _sorted_draws(self._estimator, self._count)
        places = len(ordered)
        return [ordered[int((i + shift) / count * places) % places] for i in range(count)]

    def plan(self, turn: int) -> list[tuple[float, int]]:
        """An undrawn step, and drawn ones spread evenly over the order of their first layer."""
        if self._undrawn == 0:
            return [(1.0, turn)]
        empty, _ = _sorted_draws(self._estimator, self._count)
        drawn = self.drawn(STRATA, shift=(0.5 + 0.618034 * turn) % 1)
        share = self.chance / STRATA
        return [(self._undrawn, empty), *((share, draw) for draw in drawn)]


@cache
def _sorted_draws(estimator: Estimator, count: int) -> tuple[int, list[int]]:
    """A draw of nothing, and 200 of something in the order of their first layer."""
    empty, found, draw = 0, list[tuple[int, int]](), 0
    while len(found) < 200:
        layers = estimator.layers(count, probes.layer_seed(probes.call_seed(0, draw)))
        if layers:
            found.append((layers[0], draw))
        else:
            empty = draw
        draw += 1
    return empty, [draw for _, draw in sorted(found)]


class Fused(Runner):
    """Nested autograd on the model's own fused operators: as most code does it, and wrong."""

    def __init__(self, problem: Problem, weight: float, curvature: str) -> None:
        super().__init__(problem, weight)
        self.curvature = curvature

    def run(self) -> None:
        """The engine ``autograd`` without its safe operators."""
        task = make_task(
            self.problem.model,
            self.problem.closure,
            probes.choose(self.problem.model),
            seht.SehtH(),
            probes.call_seed(0, self.draw),
            curvature=self.curvature,
        )
        assert isinstance(task, Task)
        boundary = Boundary(task) if self.curvature == "ggn" else None
        with boundary or nullcontext():
            loss = self.problem.closure()
        if boundary is None:
            trace, _ = autograd.hutchinson(loss, task)
        else:
            trace, _ = autograd.gauss_newton(loss, boundary, task, set())
        (loss + self.weight * trace).backward()


class SamStep(Runner):
    """SAM's two passes (arXiv 2010.01412): the gradient at the worst point nearby."""

    rho = 0.05

    def run(self) -> None:
        self.problem.closure().backward()
        every = self.problem.model.named_parameters()
        weights: dict[str, Tensor] = {name: p for name, p in every if p.grad is not None}
        climb = {name: p.grad for name, p in weights.items() if p.grad is not None}
        self.problem.model.zero_grad()
        with Weights(weights).moved(climb, self.rho / (norm(climb.values()) + 1e-12)):
            self.problem.closure().backward()


class FisherStep(Runner):
    r"""One-sample Fisher trace :math:`B \|\nabla CE(z, y)\|^2`, y drawn from the predictions.

    In expectation over y that is tr(G). Its gradient, by ``create_graph``, is not the gradient of
    tr(G): the draw depends on the weights too, and that part is missing.
    """

    _context: Callable[[], Any] = nullcontext

    def run(self) -> None:
        """One pass with a graph of its gradient; fused attention has no such graph."""
        try:
            self._run()
        except RuntimeError as error:
            if self._context is safe_ops or "not implemented" not in str(error):
                raise
            self._context = safe_ops
            self.problem.model.zero_grad()
            self._run()

    def _run(self) -> None:
        with self._context():
            z = self.problem.logits(self.problem.x)
            loss = F.cross_entropy(z, self.problem.y.flatten())
            weights = list(probes.choose(self.problem.model).tensors.values())
            trace = fisher_trace(z, weights, self._labels(z.detach()))
        (loss + self.weight * trace).backward()

    def _labels(self, z: Tensor) -> Tensor:
        # By inverting the distribution function, so that float64 draws what float32 draws.
        ladder = z.softmax(1).cumsum(1)
        generator = torch.Generator().manual_seed(self.draw)
        u = torch.rand(len(z), 1, generator=generator).to(z.dtype)
        return torch.searchsorted(ladder, u).squeeze(1).clamp(max=z.shape[1] - 1)
