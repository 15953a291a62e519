"""How far a measurement has come: a line on the terminal, or whatever the user calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from seht.measure.numbers import duration


@dataclass(frozen=True)
class Progress:
    """How far a measurement has come."""

    what: str
    """The name of the measurement, such as ``trace``."""
    done: int
    total: int | None
    """How large ``done`` will be at the end, if that is known."""
    estimate: float | None = None
    stderr: float | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        share = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        value = "" if self.estimate is None else f"  {self.estimate:.4g}"
        if value and self.stderr is not None:
            value += f" +- {self.stderr:.2g}"
        left = ""
        if self.total is not None and 0 < self.done < self.total:
            left = f", about {duration(self.seconds * (self.total - self.done) / self.done)} left"
        return f"{self.what} {share}{value}  {duration(self.seconds)}{left}"


Report = Callable[[Progress], object] | bool | None
"""``True``: a line on standard error; a function is called with each :class:`Progress`."""


class Reporter:
    """Reports progress, at most a few times a second."""

    def __init__(self, report: Report, what: str) -> None:
        if report is not None and not isinstance(report, bool) and not callable(report):
            raise TypeError(
                f"progress must be True, a function or None, not {type(report).__name__}"
            )
        self._report = _line if report is True else report or None
        self._what, self._start, self._last = what, time.perf_counter(), 0.0
        self._written = False

    @property
    def on(self) -> bool:
        """Whether progress is reported at all."""
        return self._report is not None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def __call__(
        self,
        done: int,
        total: int | None = None,
        estimate: float | None = None,
        stderr: float | None = None,
    ) -> None:
        """Report, unless the last report was just now."""
        if self._report is None:
            return
        now = self.seconds
        if self._report is _line and self._written and now - self._last < 0.1 and done != total:
            return
        self._last, self._written = now, True
        self._report(Progress(self._what, done, total, estimate, stderr, now))

    def close(self) -> None:
        """End the line."""
        if self._report is _line and self._written:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _line(progress: Progress) -> None:
    width = 24
    bar = ""
    if progress.total:
        full = min(width, width * progress.done // progress.total)
        bar = "[" + "#" * full + "." * (width - full) + "] "
    print(f"\r\x1b[K{bar}{progress}", end="", file=sys.stderr, flush=True)
