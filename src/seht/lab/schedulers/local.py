"""Trials on this machine: in this process, or in several."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from seht.lab import progress
from seht.lab.records import RunError
from seht.lab.schedulers import Done
from seht.lab.trials import Trial


class InTurn:
    """One after the other in this process."""

    def __init__(self, watch: Callable[[Trial], progress.Watch | None] = lambda trial: None):
        self.watch = watch

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """See :class:`~seht.lab.schedulers.Scheduler`."""
        for trial in trials:
            done(trial, trial.run(self.watch(trial)))


class Processes:
    """Several at a time, each in a process of its own on this machine."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        """See :class:`~seht.lab.schedulers.Scheduler`."""
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
