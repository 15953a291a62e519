"""Who runs the trials of a comparison: one interface, and an implementation in a file of its own.

A trial is plain data, runs anywhere that sees its directory, skips itself where it is done, and
goes on where it was left; so a scheduler has nothing to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from seht.lab.records import Result
from seht.lab.trials import Trial

Done = Callable[[Trial, Result], None]
"""Is told of every trial that ends, whether done or failed."""


class Scheduler(Protocol):
    """Runs trials somewhere; the order is a wish, the results do not depend on it."""

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """Run them all; a :class:`RunError` ends the comparison, a failed trial does not."""
