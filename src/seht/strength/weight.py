"""The interface of weights, and the weights that are numbers, functions of the step or paths.

In each step the penalty asks a weight for its value and whether to look at gradients. It reports
what it saw, and from that the weight of the next step may follow.

A weight that is found or repeated bounds single steps (:class:`Calm`): a trace above its running
mean counts as that mean. One probe's trace on one batch may be many times its mean, and the
resulting step may end a training on clean data: at a weight of 1e-2 six runs on scikit-learn's
digits ended at 72 % on average, with this bound at 90 %, and at the weights that pay as high as
without a penalty.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from seht.errors import warn
from seht.strength.products import Seen
from seht.strength.schedule import Schedule, check_weight

FORMAT = "seht.WeightPath/1"
_RATE = 0.05  # a memory of some twenty penalised steps
_TIMES = 1.0
"""The largest trace that counts in full, in units of the mean: at 2, one clean run in six was lost,
at 1 none; with wrong labels 1 costs a point."""
_JUMP = 4.0
"""A single trace counts for at most this many times the mean in the running mean."""


@dataclass(frozen=True)
class WeightPath:
    """The weight λ as a function of the fraction of a training, as ``weight="tuned"`` found it.

    Give it as ``weight=`` to repeat these weights, for example on all the data including the
    held-out examples. Between its points log λ is interpolated linearly; before the first and after
    the last λ is constant. ``every`` multiplies it afterwards. It costs nothing.

    Example:
        ```python
        path = seht.WeightPath((0.1, 0.9), (1e-3, 4e-3))  # or penalty.path, after a tuned training
        penalty = seht.HessianTrace(model, weight=path, total_steps=100)
        ```

    ``json.dumps(path.state())`` saves it, and :meth:`of` makes it from such a state.
    """

    positions: tuple[float, ...]
    """Fractions of the training, in increasing order."""
    weights: tuple[float, ...]
    """λ at these positions."""
    curvature: str | None = field(default=None, compare=False)
    """The curvature of the training that found it, also used where the path is repeated, unless
    ``curvature=`` says otherwise."""

    def __post_init__(self) -> None:
        if not self.positions or len(self.positions) != len(self.weights):
            raise ValueError("a path needs as many weights as positions, and at least one of each")
        if not all(0 <= p <= 1 for p in self.positions):  # a nan is not, either
            raise ValueError(
                "the positions of a path are fractions of the training, from 0 to 1; divide steps "
                "by their number"
            )
        if any(a >= b for a, b in zip(self.positions, self.positions[1:], strict=False)):
            raise ValueError("the positions of a path must grow from one to the next")
        if not all(math.isfinite(w) and w > 0 for w in self.weights):
            raise ValueError("the weights of a path must be positive and finite")

    def at(self, position: float) -> float:
        """The weight at a fraction of the training."""
        right = bisect.bisect_right(self.positions, position)
        if right == 0:
            return self.weights[0]
        if right == len(self.positions):
            return self.weights[-1]
        a, b = self.positions[right - 1 : right + 1]
        part = (position - a) / (b - a)
        low, high = self.weights[right - 1 : right + 1]
        return low * (high / low) ** part

    def state(self) -> dict[str, Any]:
        """Plain numbers, for ``state_dict``, records and JSON."""
        named = {} if self.curvature is None else {"curvature": self.curvature}
        return {
            "format": FORMAT,
            "positions": list(self.positions),
            "weights": list(self.weights),
            **named,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> WeightPath:
        """The path that :meth:`state` wrote down."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"this is no path of weights ({found!r} in place of {FORMAT!r}); pass penalty.path "
                "of a training with weight='tuned', or what its state() wrote down"
            )
        try:
            positions, weights = (
                tuple(float(x) for x in state[name]) for name in ("positions", "weights")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this path of weights is not complete, or has something else than numbers "
                f"({error}); pass penalty.path, or what its state() wrote down"
            ) from error
        return cls(positions, weights, state.get("curvature"))

    def __repr__(self) -> str:
        """Where it begins, how far it goes, where it ends."""
        low, high = min(self.weights), max(self.weights)
        return (
            f"WeightPath({len(self.weights)} points, from {self.weights[0]:.3g} to "
            f"{self.weights[-1]:.3g}, within {low:.3g} and {high:.3g})"
        )


@dataclass(frozen=True)
class Calm:
    """The running mean of the trace's size."""

    count: int = 0
    mean: float = 0.0

    @property
    def most(self) -> float | None:
        """The largest trace that counts in full; None before the first trace."""
        return _TIMES * self.mean if self.count else None

    def after(self, trace: float) -> Calm:
        """The same with one more trace."""
        size = abs(trace) if not self.count else min(abs(trace), _JUMP * self.mean)
        rate = max(_RATE, 1 / (self.count + 1))
        return Calm(self.count + 1, self.mean + rate * (size - self.mean))


class Weight:
    """The interface of all weights; this class is a number, or a function of the step."""

    kind = "given"
    steady = False
    """Whether it is the same on all steps."""
    calm: Calm | None = None
    """If single steps with a large trace are held back: the running mean they are compared with."""

    def __init__(self, weight: float | Callable[[int], float]) -> None:
        self.value = weight if callable(weight) else check_weight(weight)
        self.steady = not callable(weight)

    def at(self, step: int, schedule: Schedule) -> float:
        """The weight of a step, before ``every`` and ``ramp``."""
        return check_weight(self.value(step)) if callable(self.value) else self.value

    def looks(self, step: int, schedule: Schedule) -> frozenset[str]:
        """Which gradients it needs in this penalised step, of `LOSS`, `TRACE` and `HELD_OUT`."""
        return frozenset()

    def learn(self, step: int, schedule: Schedule, seen: Seen) -> None:
        """Update itself with the gradients it asked for."""

    timed = False
    """Whether it depends on the length of the training."""
    _beyond = False

    def overrun(self, step: int, schedule: Schedule) -> None:
        """Warn once if the training is longer than ``total_steps`` and the weight depends on it."""
        last = schedule.total_steps
        if self.timed and last is not None and step >= last and not self._beyond:
            self._beyond = True
            warn(
                f"seht: step {step} is beyond total_steps={last}: the weight stays at "
                f"{self.at(step, schedule):.3g}. Give the number of optimiser steps as "
                "total_steps=."
            )

    def with_held_out(self) -> Weight:
        """The weight to use if held-out data are given; most kinds of weight refuse them."""
        raise ValueError(
            "held_out= is for weight='tuned', and this penalty has a weight or share of its own; "
            "leave weight= and share= out, or held_out="
        )

    def warn_if_unfound(self) -> None:
        """The training is over: say so if it was too short to find the weight."""

    def charged(self, trace: float) -> None:
        """Note the size of a finite trace that was estimated."""
        if self.calm is not None:
            self.calm = self.calm.after(trace)

    def path(self, schedule: Schedule) -> WeightPath | None:
        """The values so far, if another training can repeat them."""
        return None

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; tensors and plain numbers."""
        calm = {} if self.calm is None else {"calm": asdict(self.calm)}
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
        """A function that restores the present state, for a step that fails."""
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
