"""A weight that begins at a share and is moved by held-out data, by the rule in `tuning`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from seht.errors import NonFiniteError, warn
from seht.strength.phase import Gap, Phase
from seht.strength.products import HELD_OUT, LOSS, TRACE, Seen
from seht.strength.schedule import Schedule
from seht.strength.share_weight import ShareWeight
from seht.strength.tuning import FEW, Position, Tuning
from seht.strength.weight import Weight, WeightPath

_POINTS = 2000
"""A path with more points than this is thinned out."""
_MANY = 20
"""After fewer looks than this a weight that still waits says nothing about the training."""
_ALIKE = 0.1
"""The part by which a loss may differ from a multiple of another and be taken for it."""


class TunedWeight(ShareWeight):
    """A weight that starts at a share and is moved by the gradient of a held-out loss."""

    kind = "tuned"
    timed = True

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(tuning.start)
        self._tuning = tuning
        self._position = Position(math.log(tuning.home))
        self._gap = Gap()
        self._phase = Phase() if tuning.gap > 0 else Phase(1.0)
        self._points: tuple[tuple[float, float], ...] = ()

    def at(self, step: int, schedule: Schedule) -> float:
        """0 until the start is known."""
        if self._unit is None:
            return 0.0
        return self._position.share(self._tuning) * self._phase.part * self._unit

    def with_held_out(self) -> Weight:
        """This weight itself, which needs them."""
        return self

    def looks(self, step: int, schedule: Schedule) -> frozenset[str]:
        """Loss and trace until the start is known, then trace and held-out loss."""
        if self._unit is None:
            return frozenset((LOSS, TRACE))
        if schedule.total_steps is not None and step >= schedule.total_steps:
            return frozenset()
        due = schedule.number(step) % self._spacing(schedule) == 0
        return frozenset((TRACE, HELD_OUT) if due else ())

    def _spacing(self, schedule: Schedule) -> int:
        return self._tuning.spacing(schedule.penalised, schedule.every)

    def _looks(self, schedule: Schedule) -> int | None:
        """How many there are in the whole training, if its length is known."""
        if schedule.penalised is None:
            return None
        return schedule.penalised // self._spacing(schedule)

    def _warn_if_short(self, schedule: Schedule) -> None:
        """Before the weight begins to move, while there is time to choose another."""
        looks = self._looks(schedule)
        if looks is not None and looks < FEW:
            warn(
                f"seht: this training has {looks} looks at the held-out loss, and a tuned weight "
                f"needs {FEW}: in a shorter one it grows slowly, and may gain nothing. Give "
                "share=2, or penalise more steps (every=1)."
            )

    def learn(self, step: int, schedule: Schedule, seen: Seen) -> None:
        """One more look, at the start or at held-out data."""
        if self._unit is None:
            super().learn(step, schedule, seen)
            if self._unit is not None:
                self._note(step, schedule)
                self._warn_if_short(schedule)
            return
        looks, left = self._looks(schedule), 1.0
        if looks is not None and schedule.total_steps is not None:
            left = max(0.0, 1 - step / schedule.total_steps)
        train, held_out = seen.means()
        cosine = _cosine(step, seen, held_out)
        if self._gap.looks == 0:
            _warn_of_units(train, held_out, seen.calls)
        self._gap = self._gap.after(train, held_out)
        if self._gap.same:
            raise ValueError(
                "the held-out loss is the training loss to the last digit, look by look: held_out "
                "computes it on the training batch; give it examples that are not trained on"
            )
        counts = self._gap.counts(self._tuning.gap)
        rate = self._tuning.rate(looks, left) if counts else 0.0
        allowed = self._gap.factor(self._tuning.gap)
        means = self._gap.looks, self._gap.train, self._gap.held_out
        self._phase = self._phase.after(*means, allowed, self._tuning.pace(looks))
        self._position = self._position.moved(cosine, rate, self._tuning, self._phase)
        self._note(step, schedule)

    def _note(self, step: int, schedule: Schedule) -> None:
        points = (*self._points, (float(step), self.at(step, schedule)))
        if len(points) > _POINTS:
            points = (*points[:-1:2], points[-1])
        self._points = points

    def warn_if_unfound(self) -> None:
        """Also if the weight waited to the end, because nothing was memorised as far as it saw."""
        super().warn_if_unfound()
        waited = self._tuning.gap > 0 and len({weight for _, weight in self._points}) == 1
        if waited and self._gap.looks >= _MANY:
            warn(
                "seht: the held-out loss was never clearly above the training loss, so that the "
                "tuned weight stayed at a fiftieth, where it does nothing. Either nothing was "
                "memorised, and no penalty is needed, or the held-out examples are among those "
                "that are trained on: give others."
            )

    def path(self, schedule: Schedule) -> WeightPath | None:
        """The weights so far, over the fraction of the training."""
        if not self._points:
            return None
        length = max(schedule.total_steps or 0, self._points[-1][0] + 1)  # resumed with fewer steps
        positions, weights = zip(*self._points, strict=True)
        return WeightPath(tuple(p / length for p in positions), weights)

    def state(self) -> dict[str, Any]:
        """Position, moments and path too."""
        return super().state() | {
            "position": asdict(self._position),
            "gap": asdict(self._gap),
            "phase": asdict(self._phase),
            "points": [list(point) for point in self._points],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state(state)
        self._position = Position(**state["position"])
        self._gap = Gap(**state["gap"])
        self._phase = Phase(**state["phase"])
        self._points = tuple((float(a), float(b)) for a, b in state["points"])

    def __repr__(self) -> str:
        return "'tuned'" if self._tuning == Tuning() else repr(self._tuning)


def _warn_of_units(train: float, held_out: float, calls: int) -> None:
    """The training loss may be divided for accumulation where the held-out loss is not."""
    if calls > 1 and abs(held_out - calls * train) < _ALIKE * abs(held_out):
        warn(
            f"seht: the first held-out loss is {calls} times the training loss, as if one of them "
            f"were divided by accumulate={calls}; leave the division out of the closure (divide "
            "what the penalty returns), or put it into both"
        )


def _cosine(step: int, seen: Seen, loss: float) -> float:
    u, h = seen.held_out, seen.trace
    angle, own, others = seen.products((u, h), (u, u), (h, h))
    if not math.isfinite(own + loss):
        what = "held-out loss" if math.isfinite(own) else "gradient of the held-out loss"
        raise NonFiniteError(
            f"the {what} is not finite at step {step}; look for the "
            "held-out batch that gives it, or lower the learning rate"
        )
    size = math.sqrt(own * others)
    return angle / size if size > 0 and math.isfinite(size) else 0.0
