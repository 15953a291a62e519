"""Schedulers run the trials of a comparison: one interface, and a file for each implementation.

A trial is plain data. It runs on any machine that sees its directory, is skipped if it is done, and
resumes where it stopped; so a scheduler has no state to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from seht.lab.records import Result
from seht.lab.trials import Trial

Done = Callable[[Trial, Result], None]
"""Called with every trial that ends, whether it succeeded or failed."""


class Scheduler(Protocol):
    """Runs trials somewhere, in about the given order; the results do not depend on the order."""

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """Run them all; a :class:`RunError` ends the comparison, a failed trial does not."""
