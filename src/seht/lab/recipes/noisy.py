"""Wrong labels: the experiments of the same names with 40 % of the labels replaced at random.

In the training and in the validation labels, as nobody has clean ones for validation; the test
labels are right. The validation images are cut from the experiment's own: ``--data.validation 0``
trains on all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from seht.lab.config import Recipe
from seht.lab.recipes.ours import (
    cancer,
    cifar10_16,
    cifar10_low,
    digits,
    gauss_newton,
    italy_power,
)
from seht.lab.recipes.paper import cifar10, cifar10_small

NOISE = 0.4


def digits_noisy() -> Recipe:
    """300 digits, 60 of them for validation, 4 in 10 labels replaced: seconds for a run."""
    return _noisy(digits(), gauss_newton(1e-2), validation=60)


def cifar10_16_noisy() -> Recipe:
    """cifar10-16 with 4 in 10 labels replaced: 2,000 images, 400 of them for validation."""
    return _noisy(cifar10_16(), gauss_newton(3e-3), validation=400)


def cifar10_low_noisy() -> Recipe:
    """cifar10-low with 4 in 10 labels replaced: 2,000 images, 400 of them for validation."""
    return _noisy(cifar10_low(), gauss_newton(3e-3), validation=400)


def cifar10_noisy() -> Recipe:
    """cifar10 with 4 in 10 labels replaced: 50,000 images, 5,000 of them for validation."""
    return _noisy(cifar10(), gauss_newton(3e-3), validation=5000)


def cifar10_noisy_small() -> Recipe:
    """cifar10-small with 4 in 10 labels replaced: 5,000 images, 1,000 for validation."""
    made = _noisy(cifar10_small(), gauss_newton(3e-3), validation=1000)
    return dataclasses.replace(made, name="cifar10-noisy-small")


def cifar10_large_noisy() -> Recipe:
    """All 50,000 images averaged to 16x16, a fifth of the labels replaced: some 20 minutes."""
    small = cifar10_16()
    large = dataclasses.replace(
        small,
        name="cifar10-large",
        data=dataclasses.replace(small.data, size=None),
        model=dataclasses.replace(small.model, width=16),
        epochs=25,
    )
    return _noisy(large, gauss_newton(3e-3), validation=5000, noise=0.2)


def cancer_noisy() -> Recipe:
    """cancer with 4 in 10 labels replaced: 200 cases, 40 of them for validation."""
    return _noisy(cancer(), gauss_newton(1e-2), validation=40)


def italy_power_noisy() -> Recipe:
    """italy-power with 4 in 10 labels replaced: 200 days, 40 of them for validation."""
    return _noisy(italy_power(), gauss_newton(1e-2), validation=40)


def _noisy(
    recipe: Recipe, trace: dict[str, Any], *, validation: int, noise: float = NOISE
) -> Recipe:
    # The clean experiment's weights were chosen for right labels. SEHT-D keeps its own, which is
    # bounded where there is one: at the trace's strength, a draw of it ended the training.
    kept = ("cutout", "dropblock", "seht-d")
    settings = {name: recipe.settings[name] for name in kept if name in recipe.settings}
    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}-noisy",
        data=dataclasses.replace(recipe.data, noise=noise, validation=validation, within=True),
        settings={"seht-h": trace, "seht-s": trace, **settings},
        paper=None,
    )
