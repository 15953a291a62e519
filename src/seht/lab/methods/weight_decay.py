"""The baseline."""

from __future__ import annotations

from dataclasses import replace

from seht.lab.config import Recipe
from seht.lab.methods.base import Method
from seht.lab.methods.checks import not_negative


class WeightDecay(Method):
    """SGD with weight decay: ``g + weight * w`` in place of the gradient g; the paper's baseline.

    Args:
        weight: the recipe's (5e-4 in the paper's image experiments) if not given.
    """

    name = "weight-decay"
    excludes = frozenset({"none", "linbreg"})

    def __init__(self, *, weight: float | None = None) -> None:
        self.weight = None if weight is None else not_negative("weight", weight)

    def configure(self, recipe: Recipe) -> Recipe:
        """Set the optimiser's weight decay."""
        return recipe if self.weight is None else with_decay(recipe, self.weight)


def with_decay(recipe: Recipe, weight: float) -> Recipe:
    """The recipe with this weight decay."""
    return replace(recipe, optim=replace(recipe.optim, weight_decay=weight))
