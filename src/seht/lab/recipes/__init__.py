"""The experiments: plain functions that return a complete recipe.

    recipe("cifar10-low")

The four named after a data set and without a suffix are the paper's, for GPUs. Their ``-small``
ones are the same experiment on fewer data with a narrow network, some two minutes for a method on
two cores; ``-noisy`` ones have wrong labels.
"""

from __future__ import annotations

from collections.abc import Callable

from seht.errors import unknown
from seht.lab.config import Recipe, check
from seht.lab.fields import Field, fields, from_dict, identity, override, to_dict
from seht.lab.recipes import noisy, ours, paper

__all__ = [
    "RECIPES",
    "Field",
    "check",
    "fields",
    "from_dict",
    "identity",
    "override",
    "recipe",
    "to_dict",
]

_ORDER: tuple[Callable[[], Recipe], ...] = (
    *(paper.cifar10, paper.cifar100, paper.wikitext2_lstm, paper.wikitext2_gru),
    *(paper.cifar10_small, paper.cifar100_small),
    *(paper.wikitext2_lstm_small, paper.wikitext2_gru_small),
    *(ours.cifar10_low, ours.cifar10_16, ours.digits),
    *(noisy.cifar10_noisy, noisy.cifar10_noisy_small, noisy.cifar10_low_noisy),
    *(noisy.cifar10_16_noisy, noisy.digits_noisy, noisy.cifar10_large_noisy),
    *(ours.cancer, noisy.cancer_noisy, ours.italy_power, noisy.italy_power_noisy),
    *(ours.finetune, ours.pydocs, ours.gpt_small),
    *(ours.own_table, ours.own_series, ours.own_images),
)
RECIPES = {made.__name__.replace("_", "-"): made for made in _ORDER}
"""Every recipe by its name."""


def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        raise ValueError(unknown("recipe", name, RECIPES))
    return RECIPES[name]()
