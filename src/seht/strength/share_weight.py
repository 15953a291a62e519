"""A weight such that the penalty's gradient is a share of the loss's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from seht.errors import NonFiniteError, check_positive, warn
from seht.strength.products import LOSS, TRACE, Seen, Vector, mean
from seht.strength.schedule import Schedule
from seht.strength.weight import Calm, Weight

SHARE = 2.0
"""The default. The study's search on digits chose it among 1, 2, 4, 8 and 16; 8 ended trainings."""
_MEASURED = 8
"""The share is averaged over this many penalised steps: the gradient of one probe's trace
on one batch is mostly noise."""


class ShareWeight(Weight):
    """The weight at which the penalty's averaged gradient is a share of the loss's own."""

    kind = "share"

    def __init__(self, share: float, *, follow: bool = False) -> None:
        check_positive("share", share)
        self._share, self._follow = float(share), follow
        self.calm = Calm()
        self._count = self._hidden = 0
        self._loss: Vector = {}
        self._trace: Vector = {}
        self._unit: float | None = None
        """The weight whose share is 1."""

    def at(self, step: int, schedule: Schedule) -> float:
        """0 until the share is known."""
        return 0.0 if self._unit is None else self._share * self._unit

    def looks(self, step: int, schedule: Schedule) -> frozenset[str]:
        """Both gradients on the first penalised steps, or with ``follow`` on all of them."""
        return frozenset((LOSS, TRACE) if self._unit is None or self._follow else ())

    def learn(self, step: int, schedule: Schedule, seen: Seen) -> None:
        """Average one more pair of gradients."""
        self._count, self._hidden = self._count + 1, self._hidden + seen.hidden
        rate = max(1 / self._count, 1 / _MEASURED)
        self._loss = mean(self._loss, seen.loss, rate)
        self._trace = mean(self._trace, seen.trace, rate)
        if self._count < _MEASURED:
            return
        of_loss, of_trace = seen.averaged(self._loss), seen.averaged(self._trace)
        found = seen.products((of_loss, of_loss), (of_trace, of_trace))
        loss, trace = (math.sqrt(x) for x in found)
        _refuse_zero(loss, trace)
        if self._unit is None and self._hidden == self._count:
            raise ValueError(
                "the gradient of the trace is lost in rounding on each step that was measured (as "
                "for an L1 loss of a ReLU network, which has no curvature), so that no share of it "
                "can be taken; seht.doctor says what there is, or give a weight= of your own"
            )
        self._unit = loss / trace
        if not self._follow:
            self._loss, self._trace = {}, {}

    def warn_if_unfound(self) -> None:
        """The penalty did nothing then."""
        if self._unit is None:
            warn(
                f"seht: the training ended after {self._count} penalised steps, and {_MEASURED} of "
                "them are needed to measure the share: the penalty did nothing. Train longer, "
                "penalise more steps (every=, warmup=), or give a weight= of your own."
            )

    def state(self) -> dict[str, Any]:
        """The averages too, while the share is being measured."""
        return super().state() | {
            "count": self._count,
            "hidden": self._hidden,
            "loss": self._loss,
            "trace": self._trace,
            "unit": self._unit,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on measuring, or with what was measured."""
        super().load_state(state)
        self._count, self._unit = state["count"], state["unit"]
        self._hidden = state.get("hidden", 0)
        self._loss, self._trace = dict(state["loss"]), dict(state["trace"])

    def __repr__(self) -> str:
        return f"share {self._share:g}"


def _refuse_zero(loss: float, trace: float) -> None:
    for size, what, fix in (
        (loss, "loss", "check that the closure computes the loss of this model, not a constant"),
        (trace, "trace", "try curvature='hessian', or a weight= of your own"),
    ):
        if not math.isfinite(size):
            raise NonFiniteError(
                f"the gradient of the {what} is not finite, so that no share of it can be taken; "
                "lower the learning rate, or start later (warmup=)"
            )
        if size == 0:
            raise ValueError(
                f"the gradient of the {what} is zero in all weights, so that no share of it can be "
                f"taken; {fix}"
            )
