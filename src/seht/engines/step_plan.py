"""The step of one estimate, and its check if one is due.

Each set of tensors that SEHT-D draws has its own: a check of one set says little about another. An
embedding of unit size beside weights of .02 has another best step, and another error. A set that
nobody has looked at gets the step that suits the most delicate of its tensors, and states no error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seht.engines.looks import Look
from seht.engines.step_size import LARGEST, StepControl
from seht.replay.passes import Passes
from seht.task import Directions, Task

Names = tuple[str, ...]

_SETS = 256  # so many are remembered, the last ones
_FREE = 8  # checks before they are rationed
_RATION = 64  # one check in so many uses after that: each costs several plain steps


@dataclass(frozen=True)
class DrawSteps:
    """The controls by set, and how far each tensor was moved when the step was a good one."""

    controls: dict[Names, StepControl] = field(default_factory=dict)
    reach: dict[str, float] = field(default_factory=dict)
    """By name of a tensor: the largest of its relative steps e |sigma| / |w| that suited."""
    uses: int = 0
    checks: int = 0

    def control(self, names: Names, main: StepControl) -> StepControl:
        """A copy of the set's own."""
        known = self.controls.get(names)
        if known is None:
            kappa = main.kappa if main.fixed else None
            return StepControl(kappa=kappa, fixed=main.fixed, warned=main.warned)
        return replace(known, warned=main.warned)

    def known(self, names: Names) -> bool:
        """Whether the set was checked before."""
        control = self.controls.get(names)
        return control is not None and control.looks > 0

    def learnt(self, names: Names, control: StepControl, moved: dict[str, float]) -> DrawSteps:
        """The same after a use; after a check ``moved`` has the relative step of each tensor. For
        a set that was never checked there is nothing to keep.
        """
        if not (self.known(names) or moved or control.fixed):
            return replace(self, uses=self.uses + 1)
        others = {known: c for known, c in self.controls.items() if known != names}
        controls = dict([*others.items(), (names, control)][-_SETS:])
        reach = self.reach | {n: max(size, self.reach.get(n, 0.0)) for n, size in moved.items()}
        return DrawSteps(controls, reach, self.uses + 1, self.checks + bool(moved))

    @property
    def pause(self) -> int:
        """Uses until the next check: one at first, many later."""
        return 1 if self.checks < _FREE + self.uses / _RATION else _RATION

    def state(self) -> dict[str, Any]:
        """Plain numbers, for ``state_dict``."""
        sets = [[list(names), control.state()] for names, control in self.controls.items()]
        reach = [list(pair) for pair in self.reach.items()]
        return {"sets": sets, "reach": reach, "uses": self.uses, "checks": self.checks}

    @staticmethod
    def of(state: dict[str, Any]) -> DrawSteps:
        """From what :meth:`state` returned."""
        controls = {tuple(names): StepControl.of(control) for names, control in state["sets"]}
        reach = {name: float(size) for name, size in state["reach"]}
        return DrawSteps(controls, reach, state["uses"], state["checks"])


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
