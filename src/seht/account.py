"""The books of a penalty: the number of calls, the record of the last one, the running means that
its warnings come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seht.distributed import Ranks
from seht.errors import NonFiniteError, check_count, warn
from seht.record import StepRecord
from seht.task import Estimate, Task

_DECAY = 0.95  # a memory of some twenty penalised steps
_LEAST = 20  # estimates before the guard says anything
_ERRORS = 5
"""Standard errors below zero that count as a drift. The mean is looked at on every step, so that 3
would warn in nearly every run of 10,000 steps whose traces scatter around 0, and in half of those
whose mean is a tenth of their scatter; 5 does so in less than 1 % of them if the scatter is
normal (more often if it is strongly skewed)."""
_FAINT, _PATIENCE = 0.001, 100
"""A penalty of less than that part of the loss, over so many penalised steps, does nothing: with
wrong labels, where it gains 9 points at a quarter of the loss, it gained 0.6 at 0.01 to 0.02 of it
(docs/which-weight.md)."""
_GONE = 1e-9
"""With a trace of less than that part of the loss the network's outputs no longer depend on its
weights: the weight of the penalty was too large, not too small."""


class Account:
    """Keeps the books step by step; a step that fails is taken back."""

    def __init__(self, on_nonfinite: str) -> None:
        self._raising = on_nonfinite == "raise"
        self.calls = 0
        self.guard = Guard()
        self._unmet: set[str] | None = set()
        """Chosen tensors that the loss was not seen to depend on; None once one of them was used,
        or the warning given.
        """
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
        known, guard = dict(vars(self)), dict(vars(self.guard))

        def back() -> None:
            self.__dict__.update(known)
            self.guard.__dict__.update(guard)

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

    def note(self, record: StepRecord, task: Task, estimate: Estimate, engine: str) -> float | None:
        """The step succeeded: let the engine keep what it learnt, and complete the record; returns
        the error.
        """
        error = estimate.error if estimate.learn is None else estimate.learn()
        self._look_for_use(task, estimate.unused)
        self._plain_loss = None
        self._last = replace(
            record,
            engine=engine,
            seed=task.seed,
            error=error,
            unused=estimate.unused,
            shared=estimate.shared,
        )
        return error

    def _look_for_use(self, task: Task, unused: Iterable[str]) -> None:
        """Notice a model that the closure does not use: it calls a copy of it, or another one."""
        if self._unmet is None:
            return
        names = self._unmet.union(unused)
        unmet = names.issuperset(task.weights)
        self._unmet = names if unmet and len(names) < task.count else None
        if unmet and self._unmet is None:
            warn(
                "seht: the loss depends on none of the probed parameters of this "
                f"{type(task.model).__name__}, so that the penalty is 0. Does the closure call "
                "another model, or a copy? Give HessianTrace the model that the closure calls."
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


@dataclass
class Guard:
    """Running means over the penalised steps; part of the penalty's ``state_dict``.

    ``L + lambda tr(H)`` can be lowered by making the curvature negative: with too large a weight,
    or too early a start, training runs away from the loss. The guard warns in time, once, in words
    and with the fix.
    """

    count: int = 0
    trace: float = 0.0
    spread: float = 0.0
    penalty: float = 0.0
    loss: float = 0.0
    warned_negative: bool = False
    warned_share: bool = False
    warned_faint: bool = False

    @property
    def penalty_over_loss(self) -> float:
        """Mean size of the penalty over mean size of the loss."""
        return self.penalty / self.loss if self.loss > 0 else (math.inf if self.penalty else 0.0)

    @property
    def trace_error(self) -> float:
        """Standard error of the running mean of the trace."""
        return math.sqrt(self.spread * (1 - _DECAY) / (1 + _DECAY))

    def update(
        self,
        *,
        loss: float,
        trace: float,
        penalty: float,
        weight: float,
        steady: bool = False,
        given: bool = True,
    ) -> None:
        """Count one penalised step, and warn if necessary. ``steady``: the weight has stopped
        growing. A weight that is not ``given`` was measured by gradients; with memorised labels it
        is right although the penalty outgrows the loss.
        """
        self.count += 1
        rate = max(1 - _DECAY, 1 / self.count)  # a plain mean until the memory is full
        shift = trace - self.trace
        self.trace += rate * shift
        self.spread = (1 - rate) * (self.spread + rate * shift * shift)
        self.penalty += rate * (abs(penalty) - self.penalty)
        self.loss += rate * (abs(loss) - self.loss)
        if self.count < _LEAST:
            return
        if not self.warned_negative and self.trace < -_ERRORS * self.trace_error:
            self.warned_negative = True
            warn(
                f"seht: the trace has drifted below zero (running mean {self.trace:.3g} +- "
                f"{self.trace_error:.2g}): the penalty now rewards negative curvature and has no "
                f"lower bound. Lower the weight (now {weight:.3g}), start later (warmup=), bound "
                'it with limit=, or use curvature="ggn", which is never negative for a convex loss.'
            )
        if given and not self.warned_share and self.penalty_over_loss > 1:
            self.warned_share = True
            warn(
                "seht: the penalty outgrows the loss (running mean "
                f"{self.penalty_over_loss:.3g} times its size). Lower the weight (now "
                f"{weight:.3g}), start later (warmup=), or bound the penalty with limit=, "
                "for example limit=0.5."
            )
        faint = steady and self.count >= _PATIENCE and 0 < self.penalty < _FAINT * self.loss
        if faint and not self.warned_faint:
            self.warned_faint = True
            if abs(self.trace) < _GONE * self.loss:
                warn(
                    f"seht: the trace has vanished (running mean {self.trace:.2g} beside a loss of "
                    f"{self.loss:.3g}): the network's outputs no longer depend on its weights, as "
                    f"after too strong a penalty. Lower the weight (now {weight:.3g}), or start "
                    "later (warmup=)."
                )
                return
            warn(
                f"seht: the penalty is {self.penalty_over_loss:.2g} of the loss, too little to do "
                f"anything. Raise the weight (now {weight:.3g}), or let share=2, or weight='tuned' "
                "with held-out data, find it."
            )
