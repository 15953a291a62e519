"""Trials on this machine: in this process, or in several."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from seht.commands.outputs import plain_warnings
from seht.lab import progress
from seht.lab.records import RunError
from seht.lab.schedulers import Done, Following
from seht.lab.trials import Trial

RETRIES = 3
"""How often a trial whose process has died is begun again, alone."""


class InTurn:
    """One after the other in this process."""

    def __init__(self, watch: Callable[[Trial], progress.Watch | None] = lambda trial: None):
        self.watch = watch

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        for trial in trials:
            done(trial, trial.run(self.watch(trial)))


class Processes:
    """Several at a time, each in a process of its own on this machine.

    When a process dies, the trials that were running go on one at a time, each from its last
    checkpoint: so it shows which of them kills its process, and it has the memory to itself.
    """

    def __init__(self, jobs: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.jobs, self.say = jobs, say

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        left = list(trials)
        while not self.together(left, self.jobs, done):
            self.say("a process of the comparison has died; its trial goes on from its checkpoint")
            for trial in left[: self.jobs]:  # they begin in this order: these were running
                self.apart(trial, done)
            del left[: self.jobs]

    def apart(self, trial: Trial, done: Done) -> None:
        """One trial with nothing beside it; a failed one if its process dies again and again."""
        for _ in range(RETRIES):
            if self.together([trial], 1, done):
                return
        if not trial.begun:
            raise RunError(
                "the processes of the comparison die before they begin to train; run it without "
                "--jobs to see why"
            )
        reason = f"its process has died {RETRIES + 1} times, perhaps for want of memory"
        done(trial, trial.fail(reason))

    def together(self, left: list[Trial], jobs: int, done: Done) -> bool:
        """Whether all are done; those that are, are taken out of the list."""
        from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        following = Following(self.say)
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=begin_worker)
        try:
            running = {pool.submit(trial.run): trial for trial in left}
            while running:
                ready = wait(running, following.every, FIRST_COMPLETED).done
                for future in ready:
                    trial, result = running.pop(future), future.result()
                    left.remove(trial)
                    done(trial, result)
                following.look(left)
        except BrokenProcessPool:
            return False
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return True


def begin_worker() -> None:
    """End this process when the one that started it is gone, however it went."""
    from multiprocessing import connection, parent_process

    plain_warnings()
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
