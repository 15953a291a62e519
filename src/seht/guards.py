"""Guard rails: the plain objective is unbounded below, and users should be warned in time.

``L + lambda tr(H)`` can be lowered by making the curvature negative: with too large a weight, or
too early a start, training runs away from the loss. The guard keeps running means of the trace
and of the penalty's share of the loss and warns once, in words and with the fix.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from seht.errors import PenaltyWarning

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
"""A trace of less than that part of the loss is that of a network whose outputs have stopped to
depend on its weights; no weight is too small for it."""


def warn(message: str) -> None:
    """Warn, pointing at the user's line: the first one outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] == "seht":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PenaltyWarning, stacklevel=level)


@dataclass
class Guard:
    """Running means over the penalised steps; part of the penalty's ``state_dict``."""

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


class Unmet:
    """Notices a penalty on a model that the closure does not use: a copy of it, or another one."""

    def __init__(self) -> None:
        self._names: set[str] | None = set()
        """Chosen tensors that the loss did not depend on; None once some tensor was used."""

    def state(self) -> set[str] | None:
        """What is known so far."""
        return None if self._names is None else set(self._names)

    def load_state(self, state: set[str] | None) -> None:
        """Go back to what was known."""
        self._names = state

    def look(self, drawn: Iterable[str], unused: Iterable[str], count: int, model: str) -> None:
        """Count one step; warn when all ``count`` chosen tensors were drawn and none was used."""
        if self._names is None:
            return
        self._names.update(unused)
        if not self._names.issuperset(drawn):
            self._names = None
        elif len(self._names) == count:
            self._names = None
            warn(
                f"seht: the loss depends on none of the probed parameters of this {model}, so that "
                "the penalty is 0. Does the closure call another model, or a copy? Give "
                "HessianTrace the model that the closure calls."
            )
