"""The paper's experiments on fewer data with a narrow network: some two minutes on two cores."""

from __future__ import annotations

import dataclasses
from typing import Any

from seht.lab.config import Recipe
from seht.lab.recipes.paper import cifar10, cifar100, wikitext2_gru, wikitext2_lstm


def cifar10_small() -> Recipe:
    """cifar10 on 5,000 images with a ResNet-18 of width 8, for CPUs."""
    return smaller(
        cifar10(),
        guarded=79,
        data={"size": 5000, "validation": 2000},
        model={"width": 8},
        optim={"lr": 0.05},
        batch=64,
        epochs=10,
    )


def cifar100_small() -> Recipe:
    """cifar100 on 10,000 images with WRN-10-2 of width 8, for CPUs."""
    return smaller(
        cifar100(),
        guarded=157,
        data={"size": 10000, "validation": 2000},
        model={"width": 8, "depth": 10, "factor": 2},
        optim={"milestones": (4, 7, 9)},
        batch=64,
        epochs=10,
    )


def wikitext2_lstm_small() -> Recipe:
    """wikitext2-lstm on 200,000 tokens and 5,000 words with layers of 128, for CPUs."""
    return smaller(wikitext2_lstm(), **_SMALL_TEXT)


def wikitext2_gru_small() -> Recipe:
    """wikitext2-gru on 200,000 tokens and 5,000 words with layers of 128, for CPUs."""
    return smaller(wikitext2_gru(), **_SMALL_TEXT)


_SMALL_TEXT: dict[str, Any] = {
    "data": {"size": 200_000, "validation": 50_000, "vocabulary": 5000},
    "model": {"embedding": 128, "hidden": 128},
    "optim": {},
    "epochs": 6,
    "guarded": 286,
}


def smaller(
    recipe: Recipe,
    *,
    data: dict[str, Any],
    model: dict[str, Any],
    optim: dict[str, Any],
    guarded: int | None = None,
    **top: Any,
) -> Recipe:
    """The same experiment, smaller: its figures say nothing about the paper's.

    The weights stay; the probes become one, as each costs as much as a penalty. At a learning rate
    for a few epochs the whole trace ends the training: it is huge and of either sign in the first
    of them with BatchNorm, and falls without bound in a recurrent network. So SEHT-H begins after
    so many steps (``guarded``, an epoch), at weight 1e-4, and stays below a tenth of the loss.
    """
    settings = {
        method: {**options, "probes": 1} if "probes" in options else options
        for method, options in recipe.settings.items()
    }
    if guarded is not None:
        calm = {"weight": 1e-4, "warmup": guarded, "limit": 0.1}
        settings |= {name: {**settings.get(name, {}), **calm} for name in ("seht-h", "seht-s")}
    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}-small",
        data=dataclasses.replace(recipe.data, **data),
        model=dataclasses.replace(recipe.model, **model),
        optim=dataclasses.replace(recipe.optim, **optim),
        settings=settings,
        paper=None,
        **top,
    )
