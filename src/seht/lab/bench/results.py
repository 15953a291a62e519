"""The settings and the results of a benchmark, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seht.lab.bench.cases import CASES
from seht.lab.bench.rows import BenchRow
from seht.lab.bench.timing import Timing

Say = Callable[[str], None]
"""A function that prints a line of progress."""


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


@dataclass
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

    def timed(self, found: Timing | None) -> None:
        """Its step in plain steps, where it was timed."""
        if found is not None:
            self.ratio, self.rounds = found.ratio, len(found.ratios)
            self.low, self.high = found.quartiles

    def weighed(self, memory: float, check: float | None) -> None:
        """Its memory in that of a plain step."""
        self.memory, self.check_memory = memory, check

    def judged(self, error: float | None) -> None:
        """The error of its gradient."""
        self.error = error

    def varied(self, draws: int, variance: float | None, error: float) -> None:
        """The variance of its gradient over so many draws; too large to be seen if None."""
        self.draws, self.variance = draws, variance
        self.variance_error = None if variance is None else error
        if variance is None:
            self.notes.append(f"variance: too large to be seen with {draws} draws")

    def priced(self) -> None:
        """Variance times time, where both are known."""
        if self.ratio is not None and self.variance is not None:
            self.variance_time = self.ratio * self.variance


@dataclass
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

    def row(self, key: str) -> RowResult:
        """The row of that key."""
        return next(row for row in self.rows if row.key == key)

    def timed(self, found: Mapping[str, Timing], plain_seconds: float) -> None:
        """The times of the rows, and of a plain step."""
        self.plain_seconds = plain_seconds
        for row in self.rows:
            row.timed(found.get(row.key))

    def timed_compiled(self, table: Sequence[BenchRow], found: Mapping[str, Timing]) -> None:
        """The times of these rows on the compiled model."""
        self.compiled = [RowResult.empty(row) for row in table]
        for row in self.compiled:
            row.timed(found.get(row.key))

    def weighed(self, key: str, peak: float, check: float | None) -> None:
        """The memory of a row in MiB; the plain one comes first."""
        if key == "plain":
            self.plain_mib = peak
        if self.plain_mib:
            self.row(key).weighed(
                peak / self.plain_mib, None if check is None else check / self.plain_mib
            )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaseResult:
        """What ``asdict`` made of it."""
        tables = {key: [RowResult(**row) for row in data[key]] for key in ("rows", "compiled")}
        return cls(**{**data, **tables})


def brief(error: Exception) -> str:
    """The first line of what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
