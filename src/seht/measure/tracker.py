"""The trace while a model trains: every n steps, or as often as a share of the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from seht.errors import check_count, check_options, options_of
from seht.measure.data import reads_once
from seht.measure.keep import evaluating
from seht.measure.objective import CurvatureOptions
from seht.measure.results import TraceResult
from seht.measure.trace import trace
from seht.task import LossFn


@dataclass(frozen=True)
class Tracked:
    """One entry of a tracker's history: the step, and the trace that was measured there."""

    step: int
    result: TraceResult

    def __str__(self) -> str:
        return f"step {self.step:,}: {self.result}"

    def values(self, prefix: str = "") -> dict[str, float]:
        """What is logged: the trace, its error, the norm of the weights, the loss, the time."""
        result = self.result
        found = {
            "trace": result.estimate,
            "trace_stderr": result.stderr,
            "weight_norm": result.weight_norm,
            "loss": result.loss,
            "seconds": result.seconds,
        }
        for name, layer in (result.layers or {}).items():
            found[f"trace/{name}"] = layer.estimate
        return {prefix + name: value for name, value in found.items()}


Log = Callable[[int, dict[str, float]], object]


class Tracker:
    """Measures and logs tr(H), the trace of the Hessian, while a model trains.

    Example:
        ```python
        tracker = seht.measure.Tracker(model, loss_fn, batch, every=2)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            tracker.step()
        print(tracker.history)
        ```

    Cost: that of :func:`seht.measure.trace` for each measurement.

    ``every=n`` measures at steps 0, n, 2n ... With ``budget`` it measures whenever the time spent
    on measuring, the next measurement included, stays within that fraction of the time since the
    tracker was made. How long a measurement takes is known only after the first one, which comes
    after about ``1 / budget`` steps and may exceed the budget for a while. The training is not
    touched: model, buffers, gradients and random states are as without a tracker.

    Args:
        model: the module that trains; measured in eval mode unless ``mode="as-is"``.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        data: the data to measure on: a batch, a data set or an iterable that can be read again.
        every: measure each n-th step.
        budget: or spend at most this fraction of the time, in (0, 1]; give one of the two.
        log: TensorBoard's ``SummaryWriter`` (anything with ``add_scalar``), or a function that
            takes the step and a dictionary of values; ``None`` keeps the history only.
        prefix: put before each name in the log.
        mode: ``"eval"``, or ``"as-is"`` for the mode that the model is in.
        clock: a function that returns the time in seconds.
        options: for :func:`seht.measure.trace`: ``probes``, ``tol``, ``per_layer``, ``limit`` ...
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Any,
        *,
        every: int | None = None,
        budget: float | None = None,
        log: Any = None,
        prefix: str = "seht/",
        mode: str = "eval",
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        check_options(Tracker, options, options_of(trace), CurvatureOptions.__annotations__)
        if (every is None) == (budget is None):
            raise ValueError("give one of every= (steps) and budget= (a share of the time)")
        check_count("every", every, optional=True)
        if budget is not None and not (math.isfinite(budget) and 0 < budget <= 1):
            raise ValueError(f"budget must be a share of the time in (0, 1], not {budget!r}")
        if mode not in ("eval", "as-is"):
            raise ValueError(f"mode must be 'eval' or 'as-is', not {mode!r}")
        if reads_once(data):
            raise TypeError(
                "data can be read only once, and a tracker measures again and again; pass a batch, "
                "a data set, a list of batches or a loader"
            )
        self.model, self.loss_fn, self.data = model, loss_fn, data
        self.every, self.budget, self.mode, self.prefix = every, budget, mode, prefix
        self._log = _logger(log)
        self._options = options
        self._clock = clock
        self._start = clock()
        self._spent = self._last = 0.0
        self.steps = 0
        """How often :meth:`step` was called."""
        self.history: list[Tracked] = []

    @property
    def due(self) -> bool:
        """Whether the next call of :meth:`step` measures."""
        if self.every is not None:
            return self.steps % self.every == 0
        assert self.budget is not None
        elapsed = self._clock() - self._start
        if not self.history:
            step = elapsed / max(1, self.steps)
            return self.steps > 0 and elapsed >= step / self.budget
        return self._spent + self._last <= self.budget * elapsed

    def step(self) -> TraceResult | None:
        """Call it once in each training step; it measures and logs if it is time to."""
        result = self.measure() if self.due else None
        self.steps += 1
        return result

    def measure(self) -> TraceResult:
        """Measure and log now."""
        start = self._clock()
        with evaluating(self.model, self.mode == "eval"):
            result = trace(self.model, self.loss_fn, self.data, **self._options)
        entry = Tracked(self.steps, result)
        self.history.append(entry)
        if self._log is not None:
            self._log(self.steps, entry.values(self.prefix))
        self._last = self._clock() - start
        self._spent += self._last
        return result

    @property
    def share(self) -> float:
        """The fraction of the time that went into measuring so far."""
        return self._spent / max(1e-9, self._clock() - self._start)


def _logger(log: Any) -> Log | None:
    if log is None:
        return None
    if hasattr(log, "add_scalar"):

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                log.add_scalar(name, value, step)

        return write
    if callable(log):
        return log
    raise TypeError(
        f"log must have add_scalar (TensorBoard) or be a function of (step, values), "
        f"not {type(log).__name__}"
    )
