"""Runs that are stopped between two steps and comparisons that are killed: they go on."""

import random
import signal
import time

import pytest
from small import outcome, rows, start, train

from seht.lab.progress import Watch


class Stopped(BaseException):
    """Not an Exception: nothing in the library may hold it up."""


class StopAt(Watch):
    def __init__(self, step):
        self.at = step

    def step(self, step):
        if step == self.at:
            raise Stopped


def stopped_and_resumed(recipe, method, out, *steps):
    for step in steps:
        with pytest.raises(Stopped):
            train(recipe, method, 0, out, watch=StopAt(step), save_every=0)
    return train(recipe, method, 0, out)


def end(process, log):
    process.join()
    assert process.exitcode == 0, log.read_text()


def killed_and_continued(call, tmp_path, expected, whole, kills, seed):
    """The command is killed so often before its ``whole`` epochs are done, and ends as expected."""
    draw = random.Random(seed)
    log, out = tmp_path / "log", tmp_path / "c"
    hits = 0
    for left in range(kills, 0, -1):
        # Some epochs on, so that the kills are spread over the comparison; then any moment.
        done = rows(out)
        until = done + draw.uniform(0, 2 * (whole - done) / (left + 1))
        process = start([*call, "--out", out], log)
        while process.exitcode is None and rows(out) < until:
            time.sleep(0.01)
        process.join(draw.uniform(0, 0.1))
        hits += process.exitcode is None
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
    assert hits > kills / 2
    end(start([*call, "--out", out], log), log)
    assert outcome(out) == expected
