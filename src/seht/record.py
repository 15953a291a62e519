"""What one step did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """What one call did, as plain numbers for logging."""

    step: int
    loss: float
    trace: float | None = None
    """The estimate; ``None`` on a plain step."""
    penalty: float = 0.0
    """What was added to the loss: weight * trace, after ``limit``."""
    weight: float = 0.0
    """The weight in force: with ramp and ``every``, 0 on a plain step."""
    layers: tuple[str, ...] = ()
    engine: str | None = None
    seed: int | None = None
    """Give it to :func:`seht.hessian_trace` to repeat this estimate at the same weights."""
    error: float | None = None
    """The relative error of this step's own gradient of the trace (not the probe's), where it is
    known: on steps that compare step sizes, and between them where probes were found to agree.
    Infinite where that gradient cannot be seen for rounding.
    """
    unused: tuple[str, ...] = ()
    """Drawn tensors that the loss does not depend on; they count as zero."""
    shared: tuple[str, ...] = ()
    """With ``estimator="seht-s"``: tensors that kept one direction for all examples."""

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
