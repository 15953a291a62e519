"""The record of one call of the penalty."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """What one call of the penalty did, as plain numbers for logging."""

    step: int
    """The number of the optimiser step, from 0."""
    loss: float
    """The loss without the penalty."""
    trace: float | None = None
    """The estimate; ``None`` on a plain step."""
    penalty: float = 0.0
    """What was added to the loss: weight * trace, after ``limit``."""
    weight: float = 0.0
    """The weight that was applied, ``ramp`` and ``every`` included; 0 on a plain step."""
    layers: tuple[str, ...] = ()
    """The names of the tensors that were probed."""
    engine: str | None = None
    """``"difference"`` or ``"autograd"``; ``None`` on a plain step."""
    seed: int | None = None
    """Give it to :func:`seht.hessian_trace` to repeat this estimate at the same weights."""
    error: float | None = None
    """The relative numerical error of the trace's gradient, without the probe's own noise, if it is
    known: on steps that compare step sizes, and in between if the last comparisons agreed.
    Infinite if rounding hides that gradient.
    """
    unused: tuple[str, ...] = ()
    """Probed tensors that the loss does not depend on; they add 0 to the trace."""
    shared: tuple[str, ...] = ()
    """With ``estimator="seht-s"``: tensors that were probed in one direction for all examples."""

    def __str__(self) -> str:
        """One line for people."""
        if self.trace is None:
            return f"step {self.step:,}: loss {self.loss:.4g}, without a penalty"
        known = "" if self.error is None else f", error {self.error:.1%}"
        return (
            f"step {self.step:,}: loss {self.loss:.4g} + penalty {self.penalty:.3g} "
            f"(weight {self.weight:.3g} * trace {self.trace:.4g}{known}) over "
            f"{len(self.layers)} tensors, engine {self.engine}"
        )
