"""Weights averaged over the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seht.lab.methods.base import Method, Run, share

START = 10
"""In the first steps the average forgets faster, so that it drops the initial weights."""


class Ema(Method):
    r"""The exponential moving average of the weights is validated, tested and kept.

    .. math:: \bar w \leftarrow d\, \bar w + (1 - d)\, w, \qquad
              d = \min\Bigl(decay, \frac{1 + t}{10 + t}\Bigr)

    after step t; training itself goes on as without it. Polyak and Juditsky, SIAM J. Control Optim.
    30 (1992); as usual BatchNorm's statistics are averaged along.

    Args:
        decay: what a step keeps of the average; 0.99 remembers some hundred steps.
    """

    name = "ema"

    def __init__(self, *, decay: float = 0.99) -> None:
        self.decay = share("decay", decay, one=False)
        self.steps = 0

    def setup(self, run: Run) -> None:
        self.model = run.model
        self.average = _copied(run.model.state_dict())

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (START + self.steps))
        for name, value in self.model.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1 - decay)
            else:  # how many batches BatchNorm has seen
                self.average[name].copy_(value)

    @contextmanager
    def judged(self) -> Iterator[None]:
        kept = _copied(self.model.state_dict())
        self.model.load_state_dict(self.average)
        try:
            yield
        finally:
            self.model.load_state_dict(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["average"].items():
            self.average[name].copy_(value)
        self.steps = state["steps"]


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
