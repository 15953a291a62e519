"""Schedulers run the trials of a comparison: one interface, and a file for each implementation.

A trial is plain data. It runs on any machine that sees its directory, is skipped if it is done, and
resumes where it stopped; so a scheduler has no state to keep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from seht.lab import progress
from seht.lab.records import Result, RunError, read_metrics
from seht.lab.trials import Trial

Done = Callable[[Trial, Result], None]
"""Called with every trial that ends, whether it succeeded or failed."""


class Scheduler(Protocol):
    """Runs trials somewhere, in about the given order; the results do not depend on the order."""

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """Run them all; a :class:`RunError` ends the comparison, a failed trial does not."""


EVERY = 10.0  # seconds


class Following:
    """Says the last epoch of every trial that has a new one, every so many seconds.

    The trials run in other processes, and what is said comes from the records that they write.
    """

    def __init__(self, say: Callable[[str], None], every: float = EVERY) -> None:
        self.say, self.every = say, every
        self.last = time.monotonic()
        self.told: dict[Path, int] = {}

    def look(self, trials: Iterable[Trial]) -> None:
        """Tell what is new, if it is time."""
        if time.monotonic() - self.last < self.every:
            return
        for trial in trials:
            try:
                columns = read_metrics(trial.out / "metrics.csv")
            except RunError:
                continue  # not ours to read
            done = len(columns.get("epoch", ()))
            if done != self.told.get(trial.out, 0):
                self.told[trial.out] = done
                row = {name: of[-1] for name, of in columns.items() if not math.isnan(of[-1])}
                self.say(f"{trial.name}: epoch {done}/{trial.recipe.epochs}, {progress.say(row)}")
        self.last = time.monotonic()
