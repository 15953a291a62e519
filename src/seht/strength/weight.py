"""The weight of each step: what the penalty asks of it; a number and a path.

The penalty asks for the weight of a step, and whether it should look at gradients on it; what it
saw it tells, and the next step has the weight that follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from seht.guards import warn
from seht.strength.calm import Calm
from seht.strength.path import WeightPath
from seht.strength.schedule import Schedule, check_weight
from seht.strength.seen import Seen


class Weight:
    """What the penalty asks of each way; this one is a number, or a function of the step."""

    kind = "given"
    steady = False
    """Whether it is the same on all steps."""
    calm: Calm | None = None
    """Where single steps are held back: the mean so far."""

    def __init__(self, weight: float | Callable[[int], float]) -> None:
        self.value = weight if callable(weight) else check_weight(weight)
        self.steady = not callable(weight)

    def at(self, step: int, schedule: Schedule) -> float:
        """The weight of a step, before ``every`` and ``ramp``."""
        return check_weight(self.value(step)) if callable(self.value) else self.value

    def looks(self, step: int, schedule: Schedule) -> frozenset[str]:
        """Whose gradients to look at on this penalised step: of `LOSS`, `TRACE`, `HELD_OUT`."""
        return frozenset()

    def learn(self, step: int, schedule: Schedule, seen: Seen) -> None:
        """Take in what was seen."""

    timed = False
    """Whether it goes by the length of the training."""
    _beyond = False

    def overrun(self, step: int, schedule: Schedule) -> None:
        """Say once that the training is longer than it was said to be, where that matters."""
        last = schedule.total_steps
        if self.timed and last is not None and step >= last and not self._beyond:
            self._beyond = True
            warn(
                f"seht: step {step} is beyond total_steps={last}: the weight stays at "
                f"{self.at(step, schedule):.3g}. Give the number of optimiser steps as "
                "total_steps=."
            )

    def charged(self, trace: float) -> None:
        """A trace was estimated, and is finite."""
        if self.calm is not None:
            self.calm = self.calm.after(trace)

    def path(self, schedule: Schedule) -> WeightPath | None:
        """The way so far, where it is one to be gone again."""
        return None

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; tensors and plain numbers."""
        calm = {} if self.calm is None else {"calm": self.calm.state()}
        return {"kind": self.kind, **calm, **({"beyond": self._beyond} if self.timed else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        if state.get("kind") != self.kind:
            raise ValueError(
                f"this state belongs to a {state.get('kind')} weight, and this penalty has a "
                f"{self.kind} one; make it with the weight= or share= of the run that was saved"
            )
        if self.calm is not None:
            self.calm = Calm(**state["calm"])
        self._beyond = bool(state.get("beyond", False))

    def back(self) -> Callable[[], None]:
        """The way back to what is known now; nothing is changed in place."""
        before = dict(vars(self))

        def back() -> None:
            self.__dict__.clear()
            self.__dict__.update(before)

        return back

    def __repr__(self) -> str:
        return repr(self.value)


class PathWeight(Weight):
    """The path of another training, over the length of this one."""

    kind = "path"
    timed = True

    def __init__(self, path: WeightPath) -> None:
        self._path, self.calm = path, Calm()

    def at(self, step: int, schedule: Schedule) -> float:
        """The weight at the same part of the training."""
        if schedule.total_steps is None:
            raise ValueError(
                "weight=path is a weight over the length of the training, which is not known; pass "
                "total_steps=, the number of its optimiser steps"
            )
        return self._path.at(step / schedule.total_steps)

    def path(self, schedule: Schedule) -> WeightPath:
        """The path itself."""
        return self._path

    def __repr__(self) -> str:
        return repr(self._path)
