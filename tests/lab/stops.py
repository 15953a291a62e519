"""Runs that are stopped between two steps, and go on."""

import pytest
from small import train

from seht.lab.progress import Silence


class Stopped(BaseException):
    """Not an Exception: nothing in the library may hold it up."""


class StopAt(Silence):
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
