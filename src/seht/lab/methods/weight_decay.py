"""The baseline, and no regularisation at all."""

from __future__ import annotations

from dataclasses import replace

from seht.lab.config import Recipe
from seht.lab.methods.base import Method, not_negative


class WeightDecay(Method):
    """Weight decay alone: SGD with ``g + weight * w`` in place of g; the paper's baseline.

    With AdamW, ``w - lr * weight * w`` in place of w (arXiv 1711.05101).

    Args:
        weight: the recipe's (5e-4 in the paper's image experiments) if not given.
    """

    name = "weight-decay"
    excludes = frozenset({"none", "linbreg"})

    def __init__(self, *, weight: float | None = None) -> None:
        self.weight = None if weight is None else not_negative("weight", weight)

    def configure(self, recipe: Recipe) -> Recipe:
        return recipe if self.weight is None else with_decay(recipe, self.weight)


class Nothing(Method):
    """Plain SGD without weight decay: the paper's row "Vanilla" (it quotes arXiv 2105.04319)."""

    name = "none"

    def configure(self, recipe: Recipe) -> Recipe:
        return with_decay(recipe, 0.0)


def with_decay(recipe: Recipe, weight: float) -> Recipe:
    """The recipe with this weight decay."""
    return replace(recipe, optim=replace(recipe.optim, weight_decay=weight))
