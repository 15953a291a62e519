"""Trials, the independent parts of a comparison, and who runs them.

A :class:`Scheduler` is the one seam between a comparison and the machines it runs on. A trial is
plain data, runs anywhere that sees its directory, skips itself where it is done, and goes on where
it was left.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from seht.lab import progress
from seht.lab.config import Recipe
from seht.lab.records import Record, Result, RunError

SAVE_EVERY = 30.0  # seconds
PATIENCE = 10.0  # seconds; a killed comparison's workers may take a moment to leave


@dataclass(frozen=True)
class Trial:
    """One run of a comparison: everything that its result depends on, and where it goes."""

    recipe: Recipe
    method: str
    seed: int
    out: Path
    test: bool = True
    label: str | None = None
    """The row's name where it is not the method's text."""
    data_dir: str | None = None
    device: str = "auto"
    save_every: float = SAVE_EVERY
    retry: bool = False
    """Whether it is run again where it has failed."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label or self.method}, seed {self.seed}"

    def finished(self) -> Result | None:
        """Its result, if this very run has one that is to stay."""
        from seht.lab.runner import describe

        record = Record(self.out)
        result = record.result()
        if result is not None:
            name = self.label or self.method
            record.check(describe(self.recipe, name, self.seed, self.test))
            if self.retry and not result.done:
                return None
        return result

    def run(self, watch: progress.Watch | None = None) -> Result:
        """Train, here and now."""
        from seht.lab.runner import train

        return train(
            self.recipe,
            self.method,
            self.seed,
            self.out,
            data_dir=self.data_dir,
            device=self.device,
            test=self.test,
            label=self.label,
            watch=watch,
            save_every=self.save_every,
            patience=PATIENCE,
            retry=self.retry,
        )


Done = Callable[[Trial, Result], None]
"""Is told of every trial that ends, whether done or failed."""


class Scheduler(Protocol):
    """Runs trials somewhere; the order is a wish, the results do not depend on it."""

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """Run them all; a :class:`RunError` ends the comparison, a failed trial does not."""


class InTurn:
    """One after the other in this process."""

    def __init__(self, watch: Callable[[Trial], progress.Watch | None] = lambda trial: None):
        self.watch = watch

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """See :class:`Scheduler`."""
        for trial in trials:
            done(trial, trial.run(self.watch(trial)))


class Processes:
    """Several at a time, each in a process of its own on this machine."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """See :class:`Scheduler`."""
        from concurrent.futures import ProcessPoolExecutor, as_completed
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        pool = ProcessPoolExecutor(self.jobs, get_context("spawn"), initializer=begin_worker)
        try:
            running = {pool.submit(trial.run): trial for trial in trials}
            for future in as_completed(running):
                done(running[future], future.result())
        except BrokenProcessPool as error:
            raise RunError(
                "a process of the comparison was killed, perhaps for want of memory; run the same "
                "command again to continue, with fewer --jobs if it happens again"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def begin_worker() -> None:
    """End this process when the one that started it is gone, however it went."""
    from multiprocessing import connection, parent_process

    progress.plain_warnings()
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
