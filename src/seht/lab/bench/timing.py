"""Seconds of a step over those of a plain step, taken in turns.

Every timed step stands between two plain ones, and their mean is what it is divided by: whatever
else the machine does slows all three. A step of the same kind comes before each, not timed: in
training, too, a step follows its like, and finds the memory it needs. The learning rate is 0: the
arithmetic is that of any other, and every row works at the same weights.

Freed memory stays in the process meanwhile. The C library returns large blocks to the system at
once, and the next step has to get them back page by page. What that costs depends more on the state
of the machine than on the step: the Gauss-Newton step of the LSTM took 2.4 plain steps, and an hour
later 3.0.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from seht.engines.looks import Look
from seht.engines.step_size import StepControl
from seht.lab.bench.cases import Problem
from seht.lab.bench.runners import Penalty, Runner

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def keep_memory() -> bool:
    """Keep freed memory from now on; returns whether the C library (glibc) can do it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    options = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 1 << 28}
    return all([mallopt(option, value) for option, value in options.items()])


LEAST = 0.03  # seconds; shorter steps are repeated until they take that long
LONG = 6.0  # plain steps; so long a step hardly gains by one before it


@dataclass
class Timing:
    """The ratios of one row, one for each round."""

    ratios: list[float] = field(default_factory=list)
    averaged: bool = False
    """Rounds differ in what they draw: their mean counts, not their median."""

    @property
    def ratio(self) -> float:
        """The median; the mean where rounds draw different work."""
        return (statistics.fmean if self.averaged else statistics.median)(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the rounds."""
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0]
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    def figures(self) -> dict[str, Any]:
        """What a row of the report says of it."""
        low, high = self.quartiles
        return {"ratio": self.ratio, "low": low, "high": high, "rounds": len(self.ratios)}


class Clock:
    """Times whole training steps of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._optimizer = problem.optimizer()
        self._plain = Runner(problem)
        for _ in range(3):  # the first steps allocate
            first = self._once(self._plain, 0)
        self._plain_seconds = [first]
        self._before: float | None = None
        self._repeats = max(1, math.ceil(LEAST / first))

    @property
    def plain_median(self) -> float:
        """Seconds of a plain step, over the whole run."""
        return statistics.median(self._plain_seconds)

    def _once(self, runner: Runner, draw: int) -> float:
        runner.prepare(draw)
        start = time.perf_counter()
        self._optimizer.zero_grad()
        runner.run()
        self._optimizer.step()
        return time.perf_counter() - start

    def plain(self) -> float:
        """Seconds of a plain step."""
        self._once(self._plain, 0)
        return statistics.median(self._once(self._plain, 0) for _ in range(self._repeats))

    def seconds(self, runner: Runner, turn: int, repeats: int) -> float:
        """Seconds of a step of this row, averaged over what it may draw."""
        return sum(
            weight * statistics.median(self._once(runner, draw) for _ in range(repeats))
            for weight, draw in runner.plan(turn)
        )

    def ratio(self, runner: Runner, turn: int, about: float = math.inf) -> float:
        """The same over the plain steps before and after; ``about`` is what to expect."""
        gc.collect()  # graphs of the last row are not this one's to clear away
        before = self.plain() if self._before is None else self._before
        self._before = None
        if about < LONG:
            self._once(runner, runner.plan(turn)[-1][1])
        found = self.seconds(runner, turn, max(1, round(self._repeats / about)))
        after = self._before = self.plain()  # the next row's plain step before it
        self._plain_seconds.append(after)
        return found / statistics.fmean([before, after])


def time_rows(
    problem: Problem,
    rows: dict[str, Runner],
    *,
    slow: Set[str],
    first: Set[str] = frozenset(),
    rounds: int,
    slow_rounds: int,
    budget: float,
    warm: float | None = None,
    failed: Callable[[str, Exception], None],
    said: Callable[[str, Timing], None] = lambda key, timing: None,
) -> tuple[dict[str, Timing], Clock]:
    """Time every row, round by round, until the rounds or the budget (in seconds) are through.

    ``warm`` are the seconds before, in which every row may run once; a sixth of the budget if not
    given.
    ``failed`` hears of rows that raise; rows that the budget did not reach are missing.
    """
    gc.collect()
    gc.freeze()  # the collections between rows need not look at all of torch again
    try:
        clock = Clock(problem)
        # What matters most comes first and slow rows last, in case the time does not suffice.
        order = sorted(rows, key=lambda key: (key in slow, key not in first))
        turns = _Turns(clock, {key: rows[key] for key in order}, slow, failed, said)
        turns.warm_up(budget / 6 if warm is None else warm)
        start = time.perf_counter()
        # Slow rows have their rounds at the end, and a third of the time, where they need it.
        share = 2 / 3 if any(key in slow for key in rows) else 1.0
        for turn in range(rounds):
            turns.run(turn, start + share * budget, slow=False)
        for turn in range(slow_rounds):
            turns.run(turn, start + budget, slow=True)
    finally:
        gc.unfreeze()
    return turns.found, clock


class _Turns:
    """The rounds of one model."""

    def __init__(
        self,
        clock: Clock,
        rows: dict[str, Runner],
        slow: Set[str],
        failed: Callable[[str, Exception], None],
        said: Callable[[str, Timing], None],
    ) -> None:
        self._rows, self._clock, self._slow = rows, clock, slow
        self._failed, self._said = failed, said
        self._about: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.found: dict[str, Timing] = {}
        for runner in rows.values():
            if isinstance(runner, Penalty):
                runner.steady()

    def warm_up(self, seconds: float) -> None:
        """A first step of every row; those too long for it are long enough to do without."""
        end = time.perf_counter() + seconds
        for key in list(self._rows):
            if key not in self._slow and time.perf_counter() < end:
                self._ratio(key, 0)
        self._last = {}  # a first step may compile, and says little about the next

    def run(self, turn: int, end: float, *, slow: bool) -> None:
        """One round of the slow rows or of the others, as far as the time allows."""
        for key in list(self._rows):
            left = end - time.perf_counter()
            if (key in self._slow) != slow or left < self._last.get(key, 0.0):
                continue
            ratio = self._ratio(key, turn)
            if ratio is not None:
                averaged = len(self._rows[key].plan(0)) > 1
                timing = self.found.setdefault(key, Timing(averaged=averaged))
                timing.ratios.append(ratio)
                self._said(key, timing)

    def _ratio(self, key: str, turn: int) -> float | None:
        start = time.perf_counter()
        try:
            ratio = self._clock.ratio(self._rows[key], turn, self._about.get(key, math.inf))
        except Exception as error:  # whatever it is, the other rows are still wanted
            self._failed(key, error)
            del self._rows[key]
            return None
        self._about[key], self._last[key] = ratio, time.perf_counter() - start
        return ratio


def check_cost(clock: Clock, runner: Penalty, steady: float) -> str:
    """What the engine's own checks cost: one step with a check is timed, and the engine's own
    schedule says how often there is one. ``steady`` is a step without, in plain steps.
    """
    if not runner.check_next():
        return ""
    runner.prepare(0)
    ratio = clock.ratio(runner, 0)
    runner.steady()
    schedule = StepControl(kappa=1e-2)
    first = 0
    for _ in range(1000):
        if schedule.due:
            first += 1
            schedule.search(lambda _: Look(0.0, 0.0, 1.0, 2.0, 2.0, 1.0, 0.0, share=1.0), 2.0, 2.0)
        schedule = schedule.used()
    extra = max(0.0, ratio - steady)
    return (
        f"a step on which the engine checks itself costs {ratio:.1f} plain steps. {first} of the "
        f"first 1,000 penalised steps do, {extra * first / 1000:.3f} plain steps more on average, "
        f"{extra / schedule.gap:.3f} in the long run. Timed steps are those without."
    )
