"""The steps of SEHT-D, where each drawn set of tensors has its own.

A check of one set says little about another: an embedding of unit size beside weights of .02 has
another best step, and another error. So every set has a control of its own. A set that nobody has
looked at gets the step that suits the most delicate of its tensors, and states no error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from seht.engines.step_size import StepControl

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
