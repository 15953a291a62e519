"""The settings and the results of a benchmark, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from seht.lab.bench.cases import CASES
from seht.lab.bench.rows import BenchRow


@dataclass(frozen=True)
class Settings:
    """How much is measured, and on networks of which size."""

    scale: str = "full"
    """Time and memory."""
    error_scale: str = "medium"
    variance_scale: str = "small"
    rounds: int = 15
    slow_rounds: int = 3
    budgets: dict[str, float] = field(
        default_factory=lambda: {name: case.seconds[0] for name, case in CASES.items()}
    )
    """Seconds for the timing of each model; rounds end there."""
    train: int = 60
    """Steps before errors and variances are measured."""
    error_draws: int = 3
    variance_draws: int = 150
    variance_seconds: float = 10.0
    """For each row, after the first eight draws."""
    everything: bool = True
    """Memory of all rows, with the engine's check; compiled models."""
    threads: int = 2
    total: float = 3400.0
    """Seconds after which nothing more is begun."""


FULL = Settings()
FAST = replace(
    FULL,
    error_scale="mini",
    variance_scale="mini",
    rounds=3,
    slow_rounds=1,
    budgets={name: case.seconds[1] for name, case in CASES.items()},
    train=20,
    error_draws=1,
    variance_draws=24,
    variance_seconds=1.0,
    everything=False,
    total=270.0,
)


@dataclass(frozen=True)
class RowResult:
    """One line of the table; ``None`` where there is nothing to measure or it failed."""

    key: str
    label: str
    curvature: str | None
    limit: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    memory: float | None = None
    check_memory: float | None = None
    error: float | None = None
    variance: float | None = None
    variance_error: float | None = None
    draws: int = 0
    variance_time: float | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def empty(cls, row: BenchRow) -> RowResult:
        """Nothing measured yet."""
        return cls(row.key, row.label, row.curvature, row.limit)


@dataclass(frozen=True)
class CaseResult:
    """What was found for one model."""

    name: str
    title: str
    sizes: dict[str, str]
    rows: list[RowResult]
    plain_seconds: float = 0.0
    plain_mib: float | None = None
    notes: list[str] = field(default_factory=list)
    compiled: list[RowResult] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaseResult:
        """What ``asdict`` made of it."""
        tables = {key: [RowResult(**row) for row in data[key]] for key in ("rows", "compiled")}
        return cls(**{**data, **tables})
