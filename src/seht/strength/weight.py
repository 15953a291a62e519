"""The four ways to a weight: a number, the path of another training, a share, held-out data.

The penalty asks for the weight of a step, and whether it should look at gradients on it; what it
saw it tells, and the next step has the weight that follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from seht.errors import NonFiniteError
from seht.guards import warn
from seht.strength.calm import Calm
from seht.strength.path import WeightPath
from seht.strength.products import Preconditioner, Vector, mean
from seht.strength.schedule import Schedule, check_weight
from seht.strength.tuning import Position, Tuning
from seht.tensors.dtensors import local


class Ranks(Protocol):
    """The processes that train the model, as far as they are asked here."""

    def averaged(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients as the optimiser sees them: those of all ranks."""

    def products(self, found: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Inner products over all ranks, from those of the parts."""


LOSS, TRACE, HELD_OUT = "loss", "trace", "held-out loss"

SHARE = 2.0
"""Where nothing is said. The study's search took it from 1, 2, 4, 8 and 16; 8 ended trainings."""
_MEASURED = 8
"""So many penalised steps are averaged before a share is known: the gradient of one probe's trace
on one batch is mostly noise."""
_POINTS = 2000
"""More points than that are thinned out of a path."""


@dataclass(frozen=True)
class Seen:
    """What a look found: the gradients of the loss, of the trace, of the held-out loss."""

    parameters: Mapping[str, Tensor]
    loss: Vector
    trace: Vector
    held_out: Vector
    metric: Preconditioner
    ranks: Ranks

    def products(self, *pairs: tuple[Vector, Vector]) -> list[float]:
        """Inner products, the same on all ranks."""
        found = [self.metric.inner(a, b, self.parameters) for a, b in pairs]
        leaves = list(self.parameters.values())
        return [float(x) for x in self.ranks.products(torch.stack(found), leaves)]

    def averaged(self, gradient: Vector) -> Vector:
        """Over the ranks, each of which may have missed some of the weights."""
        given = self.parameters.items()
        parts = [gradient[n] if n in gradient else torch.zeros_like(local(p)) for n, p in given]
        return dict(zip(self.parameters, self.ranks.averaged(parts), strict=True))


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


class ShareWeight(Weight):
    """Such that the penalty's averaged gradient is a share of the loss's own."""

    kind = "share"

    def __init__(self, share: float, *, follow: bool = False) -> None:
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"share must be a number such as 3.0, not {share!r}")
        if not (math.isfinite(share) and share > 0):
            raise ValueError(f"share must be positive and finite, not {share!r}")
        self._share, self._follow = float(share), follow
        self.calm = Calm()
        self._count = 0
        self._loss: Vector = {}
        self._trace: Vector = {}
        self._unit: float | None = None
        """The weight whose share is 1."""

    def at(self, step: int, schedule: Schedule) -> float:
        """0 until the share is known."""
        return 0.0 if self._unit is None else self._share * self._unit

    def looks(self, step: int, schedule: Schedule) -> frozenset[str]:
        """At the first penalised steps, or at all."""
        return frozenset((LOSS, TRACE) if self._unit is None or self._follow else ())

    def learn(self, step: int, schedule: Schedule, seen: Seen) -> None:
        """One more pair of gradients."""
        self._count += 1
        rate = max(1 / self._count, 1 / _MEASURED)
        self._loss = mean(self._loss, seen.loss, rate)
        self._trace = mean(self._trace, seen.trace, rate)
        if self._count < _MEASURED:
            return
        of_loss, of_trace = seen.averaged(self._loss), seen.averaged(self._trace)
        found = seen.products((of_loss, of_loss), (of_trace, of_trace))
        loss, trace = (math.sqrt(x) for x in found)
        _refuse_zero(loss, trace)
        self._unit = loss / trace
        if not self._follow:
            self._loss, self._trace = {}, {}

    def state(self) -> dict[str, Any]:
        """The averages too, while they are made."""
        return super().state() | {
            "count": self._count,
            "loss": self._loss,
            "trace": self._trace,
            "unit": self._unit,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on measuring, or with what was measured."""
        super().load_state(state)
        self._count, self._unit = state["count"], state["unit"]
        self._loss, self._trace = dict(state["loss"]), dict(state["trace"])

    def __repr__(self) -> str:
        return f"share {self._share:g}"


class TunedWeight(ShareWeight):
    """Begun at a share, and moved by what held-out data say."""

    kind = "tuned"
    timed = True

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(tuning.start)
        self._tuning = tuning
        self._position = Position(math.log(tuning.home))
        self._points: tuple[tuple[float, float], ...] = ()

    def at(self, step: int, schedule: Schedule) -> float:
        """0 until the start is known."""
        if self._unit is None:
            return 0.0
        return self._position.share(self._tuning) * self._unit

    def looks(self, step: int, schedule: Schedule) -> frozenset[str]:
        """At loss and trace until the start is known, then at trace and held-out loss."""
        if self._unit is None:
            return frozenset((LOSS, TRACE))
        if schedule.total_steps is not None and step >= schedule.total_steps:
            return frozenset()
        due = schedule.number(step) % self._spacing(schedule) == 0
        return frozenset((TRACE, HELD_OUT) if due else ())

    def _spacing(self, schedule: Schedule) -> int:
        return self._tuning.spacing(schedule.penalised, schedule.every)

    def learn(self, step: int, schedule: Schedule, seen: Seen) -> None:
        """One more look, at the start or at held-out data."""
        if self._unit is None:
            super().learn(step, schedule, seen)
            if self._unit is not None:
                self._note(step, schedule)
            return
        looks, left = None, 1.0
        if schedule.total_steps is not None and schedule.penalised is not None:
            looks = schedule.penalised // self._spacing(schedule)
            left = max(0.0, 1 - step / schedule.total_steps)
        rate = self._tuning.rate(looks, left)
        self._position = self._position.moved(_cosine(step, seen), rate, self._tuning)
        self._note(step, schedule)

    def _note(self, step: int, schedule: Schedule) -> None:
        points = (*self._points, (float(step), self.at(step, schedule)))
        if len(points) > _POINTS:
            points = (*points[:-1:2], points[-1])
        self._points = points

    def path(self, schedule: Schedule) -> WeightPath | None:
        """The way so far, over the relative length of the training."""
        if not self._points:
            return None
        length = schedule.total_steps or self._points[-1][0] + 1
        positions, weights = zip(*self._points, strict=True)
        return WeightPath(tuple(p / length for p in positions), weights)

    def state(self) -> dict[str, Any]:
        """Position, moments and path too."""
        return super().state() | {
            "position": self._position.state(),
            "points": [list(point) for point in self._points],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state(state)
        self._position = Position(**state["position"])
        self._points = tuple((float(a), float(b)) for a, b in state["points"])

    def __repr__(self) -> str:
        return "'tuned'" if self._tuning == Tuning() else repr(self._tuning)


def _cosine(step: int, seen: Seen) -> float:
    u, h = seen.held_out, seen.trace
    angle, own, others = seen.products((u, h), (u, u), (h, h))
    if not math.isfinite(own):
        raise NonFiniteError(
            f"the gradient of the held-out loss is not finite at step {step}; look for the "
            "held-out batch that gives it, or lower the learning rate"
        )
    size = math.sqrt(own * others)
    return angle / size if size > 0 and math.isfinite(size) else 0.0


_FAINT, _ALL = 0.05, 5.0
"""With wrong labels a share of 0.03 gained nothing and 0.1 a point, where 4 gained 7; 8 lost 10,
and at 16 little was learnt (docs/which-weight.md)."""


def _warn_of_share(name: str, share: float) -> None:
    if share < _FAINT:
        warn(
            f"seht: {name}={share:g} of the loss's gradient is too little to do anything; take "
            f"{name}=4, or 1 if the labels are right"
        )
    if share > _ALL:
        warn(
            f"seht: at {name}={share:g} the penalty is all there is: in trials 8 lost more than it "
            f"gained; take {name}=4 or less"
        )


def _refuse_zero(loss: float, trace: float) -> None:
    for size, what, fix in (
        (loss, "loss", "is the model trained already, or the loss constant?"),
        (trace, "trace", "curvature='hessian', or a weight= of your own,"),
    ):
        if not math.isfinite(size):
            raise NonFiniteError(
                f"the gradient of the {what} is not finite, so that no share of it can be taken; "
                "lower the learning rate, or start later (warmup=)"
            )
        if size == 0:
            raise ValueError(
                f"the gradient of the {what} is zero in all weights, so that no share of it can be "
                f"taken; {fix if what == 'loss' else 'try ' + fix.rstrip(',')}"
            )


def make_weight(weight: Any, share: float | None, follow: bool) -> Weight:
    """The way that the user's arguments ask for."""
    if share is not None:
        if weight is not None:
            raise ValueError("give weight= or share=, not both: a share is how a weight is found")
        way = ShareWeight(share, follow=follow)
        _warn_of_share("share", share)
        return way
    if follow:
        raise ValueError("follow=True keeps measuring a share; give it with share=")
    if weight is None:
        raise TypeError(
            "the Hessian's trace needs a weight: weight=1e-3, weight='tuned' (with held_out= in "
            "the call) or share=3.0 in its place; or leave curvature= out"
        )
    if isinstance(weight, WeightPath):
        return PathWeight(weight)
    if isinstance(weight, str):
        if weight != "tuned":
            raise ValueError(f"weight must be a number, a path or 'tuned', not {weight!r}")
        weight = Tuning()
    if not isinstance(weight, Tuning):
        return Weight(weight)
    _warn_of_share("most", weight.most)
    return TunedWeight(weight)
