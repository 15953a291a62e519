"""The step of one estimate, and its check if one is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from seht.engines.draw_steps import DrawSteps
from seht.engines.looks import Look
from seht.engines.step_size import LARGEST, StepControl
from seht.replay.passes import Passes
from seht.task import Directions, Task

Comparison = Callable[[Tensor], list[Tensor]]
"""Compares the gradients at e/2, e and 2e, for an e."""


class StepPlan:
    """The step of one estimate. The engine keeps what it learns if the step succeeds (`learn`)."""

    def __init__(self, task: Task, main: StepControl, draws: DrawSteps, *, check: bool) -> None:
        self._main, self._draws = main, draws
        self._names = tuple(task.weights)
        self._whole = len(task.weights) == task.count
        self._control = main.copy(self._names) if self._whole else draws.control(self._names, main)
        self.check = check and self._control.due and (self._whole or main.due)
        """Whether steps are compared."""
        self._moved: dict[str, float] = {}
        self._reach: dict[str, float] = {}
        """If this set of tensors was never checked: what is known of each of them."""
        if not (self._whole or main.fixed or draws.known(self._names)):
            self._reach = {n: draws.reach[n] for n in self._names if n in draws.reach}
        self._kappa = 0.0

    def start(self, curvature: str, dtype: torch.dtype) -> None:
        """Set the step for passes that compute in this dtype."""
        self._kappa = self._control.start(curvature, dtype)
        if not self._whole:
            self._main.start(curvature, dtype)

    def length(self, passes: Passes, sigma: Directions) -> Tensor:
        """The step e along a probe."""
        e = passes.weights.step(sigma, self._kappa)
        if not self._reach:
            return e
        most = passes.weights.step(sigma, LARGEST)
        within = passes.weights.within(sigma, self._reach).to(e.dtype)
        return torch.where(within.isfinite(), torch.minimum(within, most), e)

    def search(
        self,
        passes: Passes,
        sigma: Directions,
        compare: Comparison,
        a: float,
        b: float,
        common: float = 0.0,
    ) -> None:
        """Compare steps along a probe, and go on with the best.

        Truncation grows like e^a, rounding like e^-b, of which ``common`` is the centre's.
        """
        unit = passes.weights.step(sigma, 1.0)
        if self._reach:  # a better place to begin at
            self._control.begin_at(float(self.length(passes, sigma) / unit))

        def look(kappa: float) -> Look:
            seen = torch.stack([v.double() for v in compare(kappa * unit)]).tolist()
            return replace(Look(*seen), grain=self._control.eps * seen[-1], common=common)

        self._control.search(look, a, b)
        self._kappa = self._control.kappa or self._kappa
        self._reach = {}
        if not self._whole:
            sizes, parts = passes.weights.lengths(sigma)
            relative = (self._kappa * unit * parts / sizes).tolist()
            pairs = zip(passes.used, relative, strict=True)
            self._moved = {n: r for n, r in pairs if 0 < r < 1e9}

    def learn(self) -> tuple[StepControl, DrawSteps, float | None]:
        """The engine's controls after this use, and the error of this use."""
        control = self._control.used()
        error = control.error
        if self._whole:
            return control, self._draws, error
        draws = self._draws.learnt(self._names, control, self._moved)
        main = replace(self._main.used(), error=error, warned=control.warned)
        if self._moved:
            later = main.uses + draws.pause - 1
            main = replace(main, kappa=control.kappa, next_check=later)
        return main, draws, error
