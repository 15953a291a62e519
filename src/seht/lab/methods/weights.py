"""Which weights a run ends with: their average, or those of the best epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seht.lab.config import Recipe
from seht.lab.methods.base import Method, Run, at_least, share

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

    def judged(self) -> AbstractContextManager[None]:
        return exchanged(self.model, self.average)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["average"].items():
            self.average[name].copy_(value)
        self.steps = state["steps"]


@contextmanager
def exchanged(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with these values of its parameters and buffers, for a while."""
    state = model.state_dict()
    kept = _copied({name: state[name] for name in values})
    model.load_state_dict(values, strict=False)
    try:
        yield
    finally:
        model.load_state_dict(kept, strict=False)


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


class EarlyStopping(Method):
    """Ends with the weights of the epoch that was best on the validation data.

    Best by accuracy and, among equals, by loss; text by loss. The validation labels are as wrong
    as the training labels where the recipe has noise. Without ``patience`` every epoch is trained
    and the best one kept, which leaves the schedule of the learning rate alone.

    Args:
        patience: stop after so many epochs without a new best; never if not given.
    """

    name = "early-stopping"
    chooses = True

    def __init__(self, *, patience: int | None = None) -> None:
        self.patience = None if patience is None else at_least("patience", patience, 1)

    def configure(self, recipe: Recipe) -> Recipe:
        if recipe.task != "text" and not recipe.data.validation:
            raise ValueError(
                "early-stopping chooses the epoch on validation examples, and data.validation is "
                "0; hold some out, for example --data.validation 60"
            )
        return recipe

    def stop(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        return self.patience is not None and since_best(rows) >= self.patience


def score(row: Mapping[str, Any]) -> tuple[float, float]:
    """The score of an epoch: accuracy, then a small loss; for text a small loss."""
    return (row.get("valid_top1") or 0.0, -row["valid_loss"])


def since_best(rows: Sequence[Mapping[str, Any]]) -> int:
    """Epochs after the best one so far; of equals the first counts."""
    if not rows:
        return 0
    scores = [score(row) for row in rows]
    return len(rows) - 1 - scores.index(max(scores))
