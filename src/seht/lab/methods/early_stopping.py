"""Early stopping, and which epoch of a run is the best on the validation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seht.lab.config import Recipe
from seht.lab.methods.base import Method, at_least


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
