"""What the check found out, as frozen records that speak in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["trusted", "wrong", "inconclusive", "failed"]


@dataclass(frozen=True)
class EngineReport:
    """What the check found out about one engine."""

    engine: str
    verdict: Verdict
    error: float | None = None
    """The largest relative difference from the truth, in the trace or its gradient."""
    directions: int = 0
    """Along how many random probes it was measured."""
    module: str | None = None
    """The module that breaks the engine on its own (``""``: the model's own forward)."""
    kind: str | None = None
    """That module's class."""
    reason: str | None = None
    advice: str | None = None

    def __str__(self) -> str:
        """One sentence."""
        count = f"{self.directions} direction{'s' if self.directions != 1 else ''}"
        where = ""
        if self.module is not None:
            place = f"module {self.module!r}" if self.module else "the model's own forward"
            where = f" because of {place} ({self.kind})"
        measured = f"relative error {self.error or 0:.2g} over {count}"
        if self.verdict == "trusted":
            said = f"the penalty's gradient can be trusted ({measured})"
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
    """What :func:`check` found out; ``str(report)`` says it in words."""

    engines: Mapping[str, EngineReport]
    model: str
    tensors: int
    weights: int
    loss: float

    @property
    def ok(self) -> bool:
        """Whether every engine that was checked can be trusted."""
        return all(report.verdict == "trusted" for report in self.engines.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = {"ok": self.ok, **asdict(self)}
        for report in plain["engines"].values():
            if report["error"] is not None and not math.isfinite(report["error"]):
                report["error"] = None  # JSON knows no infinity; the verdict says it
        return plain

    def __str__(self) -> str:
        """A line on what was checked and one for each engine."""
        head = (
            f"{self.model}: {self.weights:,} probed weights in {self.tensors} tensors, "
            f"loss {self.loss:.4g}, on a float64 copy"
        )
        return "\n".join([head, *map(str, self.engines.values())])
