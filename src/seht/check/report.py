"""The result of a check, as frozen records that print as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["trusted", "wrong", "imprecise", "inconclusive", "failed"]


@dataclass(frozen=True)
class EngineReport:
    """The verdict on one engine."""

    engine: str
    verdict: Verdict
    error: float | None = None
    """The largest relative error of the trace or its gradient, on the float64 copy."""
    directions: int = 0
    """The number of random probes it was measured with."""
    own: float | None = None
    """The same error in the precision of the model's weights, after some steps to adapt."""
    steps: int = 0
    """The number of these steps."""
    kappa: tuple[float, float] | None = None
    """The smallest and largest relative step that the difference engine took in them."""
    module: str | None = None
    """The module that breaks the engine on its own (``""``: the model's own forward)."""
    kind: str | None = None
    """That module's class."""
    reason: str | None = None
    """Why the engine is not trusted."""
    advice: str | None = None
    """What to do about it."""

    def __str__(self) -> str:
        count = f"{self.directions} direction{'s' if self.directions != 1 else ''}"
        where = ""
        if self.module is not None:
            place = f"module {self.module!r}" if self.module else "the model's own forward"
            where = f" because of {place} ({self.kind})"
        measured = f"relative error {self.error or 0:.2g} over {count}"
        if self.own is not None:
            measured += f"; {self.own:.2g} in the model's own precision after {self.steps} steps"
        if self.kappa is not None:
            measured += f" at kappa={' to '.join(f'{k:.1g}' for k in dict.fromkeys(self.kappa))}"
        if self.verdict == "trusted":
            said = f"the penalty's gradient can be trusted ({measured})"
        elif self.verdict == "imprecise":
            said = f"the penalty's gradient is IMPRECISE ({measured}); {self.reason}"
        elif self.verdict == "wrong":
            said = f"the penalty's gradient is WRONG ({measured}){where}; {self.reason}"
        elif self.verdict == "failed":
            said = f"FAILED{where}: {self.reason}"
        else:
            said = f"inconclusive, no promise about the penalty's gradient: {self.reason}"
        said += f"; {self.advice}" if self.advice else ""
        return f"engine {self.engine}: {said}"


@dataclass(frozen=True)
class CheckReport:
    """The result of :func:`seht.check`; ``print(report)`` shows it in words."""

    engines: Mapping[str, EngineReport]
    """The verdict on each engine, by its name."""
    model: str
    """The model's class."""
    tensors: int
    """How many tensors are probed."""
    weights: int
    """How many entries they have."""
    loss: float
    """The loss on the batch."""
    curvature: str = "hessian"
    boundary: str | None = None
    estimator: str = "seht-h"

    @property
    def ok(self) -> bool:
        """Whether every engine that was checked can be trusted."""
        return all(report.verdict == "trusted" for report in self.engines.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = {"ok": self.ok, **asdict(self)}
        for report in plain["engines"].values():
            for name in ("error", "own"):
                if report[name] is not None and not math.isfinite(report[name]):
                    report[name] = None  # JSON knows no infinity; the verdict says it
        return plain

    def __str__(self) -> str:
        """A line on what was checked and one for each engine."""
        head = (
            f"{self.model}: {self.weights:,} probed weights in {self.tensors} tensors, "
            f"loss {self.loss:.4g}, on a float64 copy; {self.estimator}, "
            f"curvature={self.curvature!r}"
            + (f", boundary={self.boundary!r}" if self.boundary else "")
        )
        return "\n".join([head, *map(str, self.engines.values())])
