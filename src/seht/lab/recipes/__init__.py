"""The experiments: plain functions that return a complete recipe.

    recipe("cifar10-low")

The four named after a data set and without a suffix are the paper's, for GPUs. Their ``-small``
ones are the same experiment on fewer data with a narrow network, some two minutes for a method on
two cores; ``-noisy`` ones have wrong labels.
"""

from __future__ import annotations

from collections.abc import Callable

from seht.errors import unknown
from seht.lab.checking import check
from seht.lab.config import Recipe
from seht.lab.fields import Field, fields, from_dict, identity, override, to_dict
from seht.lab.recipes.few import cifar10_16, cifar10_low, digits, finetune
from seht.lab.recipes.noisy import (
    cancer_noisy,
    cifar10_16_noisy,
    cifar10_large_noisy,
    cifar10_low_noisy,
    cifar10_noisy,
    cifar10_noisy_small,
    digits_noisy,
    italy_power_noisy,
)
from seht.lab.recipes.other import cancer, italy_power
from seht.lab.recipes.own import own_images, own_series, own_table
from seht.lab.recipes.paper import cifar10, cifar100, wikitext2_gru, wikitext2_lstm
from seht.lab.recipes.small import (
    cifar10_small,
    cifar100_small,
    wikitext2_gru_small,
    wikitext2_lstm_small,
)
from seht.lab.recipes.text import gpt_small, pydocs

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

RECIPES: dict[str, Callable[[], Recipe]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "wikitext2-lstm": wikitext2_lstm,
    "wikitext2-gru": wikitext2_gru,
    "cifar10-small": cifar10_small,
    "cifar100-small": cifar100_small,
    "wikitext2-lstm-small": wikitext2_lstm_small,
    "wikitext2-gru-small": wikitext2_gru_small,
    "cifar10-low": cifar10_low,
    "cifar10-16": cifar10_16,
    "digits": digits,
    "cifar10-noisy": cifar10_noisy,
    "cifar10-noisy-small": cifar10_noisy_small,
    "cifar10-low-noisy": cifar10_low_noisy,
    "cifar10-16-noisy": cifar10_16_noisy,
    "digits-noisy": digits_noisy,
    "cifar10-large-noisy": cifar10_large_noisy,
    "cancer": cancer,
    "cancer-noisy": cancer_noisy,
    "italy-power": italy_power,
    "italy-power-noisy": italy_power_noisy,
    "finetune": finetune,
    "pydocs": pydocs,
    "gpt-small": gpt_small,
    "own-table": own_table,
    "own-series": own_series,
    "own-images": own_images,
}
"""Every recipe by its name."""


def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        raise ValueError(unknown("recipe", name, RECIPES))
    return RECIPES[name]()
