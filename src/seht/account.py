"""The books of a penalty: the number of calls, the record of the last one, and its warnings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from seht.distributed import Ranks
from seht.errors import NonFiniteError, check_count
from seht.guards import Guard, Unmet, warn
from seht.record import StepRecord
from seht.task import Estimate, Task


class Account:
    """Keeps the books step by step; a step that fails is taken back."""

    def __init__(self, on_nonfinite: str) -> None:
        self._raising = on_nonfinite == "raise"
        self.calls = 0
        self.guard = Guard()
        self._unmet = Unmet()
        self._last: StepRecord | None = None
        self._plain_loss: Tensor | None = None
        """With a weight of 0 the loss is not copied to the host until somebody asks for it."""
        self._warned = False

    @property
    def last(self) -> StepRecord | None:
        """What the last call did; ``None`` before the first."""
        if self._last is not None and self._plain_loss is not None:
            self._last = replace(self._last, loss=float(self._plain_loss))
            self._plain_loss = None
        return self._last

    def back(self) -> Callable[[], None]:
        """A function that restores the present state, for a step that fails."""
        known, guard, unmet = dict(vars(self)), dict(vars(self.guard)), self._unmet.state()

        def back() -> None:
            self.__dict__.update(known)
            self.guard.__dict__.update(guard)
            self._unmet.load_state(unmet)

        return back

    def count(self) -> None:
        """Count one more call that has ended."""
        self.calls += 1

    # --- steps --------------------------------------------------------------------------------

    def plain(self, step: int, loss: float) -> None:
        """A plain step of a training that is penalised in others."""
        _check_finite(loss)
        self._last, self._plain_loss = StepRecord(step, loss), None

    def unseen(self, step: int, loss: Any) -> None:
        """A step of a training without a penalty: its loss is not read."""
        self._last = StepRecord(step, math.nan)
        one = isinstance(loss, Tensor) and loss.numel() == 1
        self._plain_loss = loss.detach() if one else None

    def charge(
        self,
        task: Task,
        estimate: Estimate,
        step: int,
        ranks: Ranks,
        *,
        steady: bool,
        given: bool,
    ) -> tuple[Tensor, StepRecord, bool]:
        """The penalised loss of a step, a first version of its record, and whether the trace is
        finite on all ranks. ``steady``: the weight has stopped growing. ``given``: the user gave it
        as a number.
        """
        factor = task.coefficient(estimate.loss, estimate.trace)
        seen = [estimate.loss, estimate.trace, factor]
        # The only time that a step waits for the device, but for the rare checks of its engine.
        loss, trace, used = torch.stack([v.detach().double() for v in seen]).tolist()
        everywhere = ranks.check_finite(loss, trace, step, raising=self._raising)
        _check_finite(loss)
        penalty, total = 0.0, estimate.total
        if math.isfinite(trace):
            penalty = used * trace
            if total is None:
                total = estimate.loss + used * estimate.trace
            self.guard.update(
                loss=loss,
                trace=trace,
                penalty=penalty,
                weight=task.weight,
                steady=steady,
                given=given,
            )
        elif self._raising:
            raise NonFiniteError(
                f"the trace estimate is {trace} at step {step} although the loss is finite; lower "
                "the learning rate or the weight, or pass on_nonfinite='skip' to leave the penalty "
                "out on such steps"
            )
        else:
            total = estimate.loss if total is None else total
            if not self._warned:
                self._warned = True
                warn(
                    f"seht: the trace estimate is {trace} at step {step}; the penalty is left out "
                    "on such steps (on_nonfinite='skip')"
                )
        record = StepRecord(step, loss, trace, penalty, task.weight, tuple(task.weights))
        return total, record, everywhere

    def note(self, record: StepRecord, task: Task, estimate: Estimate, engine: str) -> None:
        """The step succeeded: let the engine keep what it learnt, and complete the record."""
        error = estimate.error if estimate.learn is None else estimate.learn()
        self._unmet.look(task.weights, estimate.unused, task.count, type(task.model).__name__)
        self._plain_loss = None
        self._last = replace(
            record,
            engine=engine,
            seed=task.seed,
            error=error,
            unused=estimate.unused,
            shared=estimate.shared,
        )

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Numbers that a resumed run goes on with."""
        return {
            "calls": self.calls,
            "guard": asdict(self.guard),
            "warned_nonfinite": self._warned,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned; the last record is not among it."""
        check_count("calls", state["calls"], 0)
        self.guard, self.calls = Guard(**state["guard"]), state["calls"]
        self._warned = bool(state.get("warned_nonfinite", False))
        self._last = self._plain_loss = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the record as numbers, never a tensor of the last graph."""
        self.last  # noqa: B018
        return dict(self.__dict__)


def _check_finite(loss: float) -> None:
    """Refuse NaN and infinity."""
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss is {loss}; lower the learning rate, clip gradients, or look for the first "
            "batch that gives it"
        )
