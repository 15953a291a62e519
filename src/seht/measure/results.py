"""What a trace measurement found, as a frozen record that carries its error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from seht.measure.numbers import with_error
from seht.measure.stats import student


def interval(estimate: float, stderr: float, dof: float, level: float) -> tuple[float, float]:
    """Student's confidence interval."""
    if not math.isfinite(stderr):
        student(level, 1)  # a bad level is an error all the same
        return (math.nan, math.nan)
    half = student(level, dof) * stderr
    return (estimate - half, estimate + half)


class PlainResult:
    """A frozen record that can be printed, and written as JSON."""

    beside: ClassVar[tuple[str, ...]] = ()
    """Names of properties that :meth:`as_dict` adds to the fields."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with ``None`` for what is not finite."""
        return plain({**vars(self), **{name: getattr(self, name) for name in self.beside}})


@dataclass(frozen=True)
class Layer:
    """One tensor's part of the trace: the trace of its own block of the Hessian."""

    estimate: float
    stderr: float
    weights: int
    """How many entries the tensor has."""
    weight_norm: float
    dof: float
    """Degrees of freedom of ``stderr``: with few probes an interval is wider than 2 errors."""

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval of this layer's trace at that level (Student's t)."""
        return interval(self.estimate, self.stderr, self.dof, level)

    def __str__(self) -> str:
        return f"{with_error(self.estimate, self.stderr)} ({self.weights:,} weights)"


@dataclass(frozen=True)
class TraceResult(PlainResult):
    """The trace of the data's mean loss, and how well it is known."""

    estimate: float
    stderr: float
    """Standard error over probes, given the data; nan with one replicate."""
    dof: float
    """Degrees of freedom of ``stderr``, for Student's t."""
    samples: int
    """How many examples were read."""
    layers: Mapping[str, Layer] | None
    """The part of each tensor, by name; ``None`` without ``per_layer``."""
    weight_norm: float
    """The norm of the probed weights: a trace can fall just because the weights grow."""
    seconds: float
    curvature: str = "hessian"
    method: str = "per-sample"
    """``per-sample``: a probe for each example; ``shared``: one for each micro-batch."""
    probes: int = 2
    """Replicates for each micro-batch, over all readings of the data."""
    loss: float = math.nan
    """The mean loss of what was read."""
    partial: bool = False
    """Whether only a part of the data was read."""
    sampling_stderr: float | None = None
    """If only a part of the data was read: the standard error that comes from this choice."""
    step_error: float | None = None
    """Relative error of the finite differences, estimated from two step sizes."""
    reached: bool | None = None
    """Whether the tolerance was reached; ``None`` where none was asked for."""
    notes: tuple[str, ...] = ()
    """Remarks, such as why probes are shared or what was left out."""

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval of the trace of this data at that level (Student's t)."""
        return interval(self.estimate, self.stderr, self.dof, level)

    @property
    def relative(self) -> float:
        """The standard error over the estimate."""
        return self.stderr / abs(self.estimate) if self.estimate else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with ``None`` for what is not finite."""
        return {**super().as_dict(), "interval": plain(self.interval())}

    def __str__(self) -> str:
        kind = "tr(G)" if self.curvature == "ggn" else "tr(H)"
        low, high = self.interval()
        said = f"{kind} = {self.estimate:.4g} +- {self.stderr:.2g} (95 %: {low:.4g} to {high:.4g})"
        said += f" on {self.samples:,} samples, {self.method} probes, {self.seconds:.1f} s"
        return said if self.reached is not False else f"{said} (the tolerance was not reached)"


def plain(value: Any) -> Any:
    """The value for JSON: tuples as lists, what is not finite as ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PlainResult):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value
