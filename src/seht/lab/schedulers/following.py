"""The progress of trials in other processes, from the records that they write."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from seht.lab import progress
from seht.lab.trials import Trial

EVERY = 10.0  # seconds


class Following:
    """Says the last epoch of every trial that has a new one, every so many seconds."""

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
                with open(trial.out / "metrics.csv", newline="", encoding="utf-8") as file:
                    rows = list(csv.DictReader(file))
                row = {name: float(value) for name, value in rows[-1].items() if value}
            except (OSError, LookupError, TypeError, ValueError, csv.Error):
                continue  # it has not begun, or has just been moved; or is not ours to read
            if len(rows) != self.told.get(trial.out):
                self.told[trial.out] = len(rows)
                self.say(
                    f"{trial.name}: epoch {len(rows)}/{trial.recipe.epochs}, {progress.say(row)}"
                )
        self.last = time.monotonic()
