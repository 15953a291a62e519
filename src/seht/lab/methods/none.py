"""No regularisation at all."""

from __future__ import annotations

from seht.lab.config import Recipe
from seht.lab.methods.base import Method
from seht.lab.methods.weight_decay import with_decay


class Nothing(Method):
    """Plain SGD without weight decay: the paper's row "Vanilla" (it quotes arXiv 2105.04319)."""

    name = "none"

    def configure(self, recipe: Recipe) -> Recipe:
        """Weight decay 0."""
        return with_decay(recipe, 0.0)
