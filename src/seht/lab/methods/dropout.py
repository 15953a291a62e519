"""Dropout."""

from __future__ import annotations

from dataclasses import replace

from seht.lab.config import Recipe
from seht.lab.methods.base import Method, share


class Dropout(Method):
    """Dropout in the network: between the convolutions of residual blocks, around recurrent layers.

    Srivastava et al., 2014. In the paper 0.3 in Wide ResNet and GRU, 0.5 in the LSTM. An option of
    the networks, so that it combines with everything.

    Args:
        rate: the share that is dropped; if not given the recipe's own, or 0.3 where it has none.
    """

    name = "dropout"

    def __init__(self, *, rate: float | None = None) -> None:
        self.rate = None if rate is None else share("rate", rate, one=False)

    def configure(self, recipe: Recipe) -> Recipe:
        rate = (recipe.model.dropout or 0.3) if self.rate is None else self.rate
        return replace(recipe, model=replace(recipe.model, dropout=rate))
