"""Methods that are settings: weight decay, dropout, and label smoothing."""

from __future__ import annotations

from dataclasses import replace

from seht.lab.config import Recipe
from seht.lab.methods.base import Method, not_negative, share


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


class LabelSmoothing(Method):
    r"""Targets that leave every class a little probability.

    Cross-entropy with targets :math:`(1 - \epsilon)\,\mathrm{onehot} + \epsilon / K`.

    Szegedy et al., arXiv 1512.00567. The paper adds :math:`\lambda U`, U the mean of
    :math:`-\log p_k` over the classes, to the cross-entropy, which is :math:`1 + \lambda` times
    label smoothing with :math:`\epsilon = \lambda / (1 + \lambda)`; that factor, a learning rate,
    is left out.

    Args:
        weight: the paper's lambda (0.01 on CIFAR-10, 0.1 on CIFAR-100).
        eps: epsilon itself, in place of ``weight``.
    """

    name = "label-smoothing"

    def __init__(self, *, weight: float = 0.1, eps: float | None = None) -> None:
        weight = not_negative("weight", weight)
        self.smoothing = weight / (1 + weight) if eps is None else share("eps", eps, one=False)
