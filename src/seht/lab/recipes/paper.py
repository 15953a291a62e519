"""The paper's four experiments, for GPUs, and the same on fewer data with a narrow network.

Weights that it selected are in ``settings``, by the method they belong to. The small ones take some
two minutes on two cores.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe

VALIDATION = 5000  # of the 50,000 CIFAR training images: nothing is ever chosen on the test set


def cifar10() -> Recipe:
    """The paper's table 1: ResNet-18, batches of 32, 200 epochs, lr 0.01, cosine to 0.

    One thing is ours: 5,000 training images are held out for validation. ``--data.validation 0``
    trains on all of them.
    """
    return Recipe(
        name="cifar10",
        data=DataConfig("cifar10", validation=VALIDATION, crop=4, flip=True),
        model=ModelConfig("resnet18", width=64),
        optim=OptimConfig(lr=0.01, momentum=0.9, weight_decay=5e-4, schedule="cosine"),
        batch=32,
        epochs=200,
        settings={
            "seht-h": {"weight": 0.001, "probes": 5},
            "seht-d": {"weight": 0.001, "probes": 10, "prob": 0.05},
            "confidence-penalty": {"weight": 0.001},
            "label-smoothing": {"weight": 0.01},
            "cutout": {"size": 16},
        },
        paper="table1",
    )


def cifar100() -> Recipe:
    """The paper's table 2: WRN-28-10, batches of 32, 200 epochs, lr 0.1, times 0.2 at 60, 120, 160.

    5,000 training images are held out, as in :func:`cifar10`.
    """
    return Recipe(
        name="cifar100",
        data=DataConfig("cifar100", validation=VALIDATION, crop=4, flip=True),
        model=ModelConfig("wrn", width=16, depth=28, factor=10),
        optim=OptimConfig(
            lr=0.1,
            momentum=0.9,
            weight_decay=5e-4,
            schedule="steps",
            milestones=(60, 120, 160),
            gamma=0.2,
        ),
        batch=32,
        epochs=200,
        settings={
            "seht-h": {"weight": 0.1, "probes": 1},
            "seht-d": {"weight": 0.1, "probes": 1, "prob": 0.05},
            "confidence-penalty": {"weight": 0.1},
            "label-smoothing": {"weight": 0.1},
            "cutout": {"size": 8},
            "dropout": {"rate": 0.3},
        },
        paper="table2",
    )


def wikitext2_lstm() -> Recipe:
    """The paper's table 3: two layers of 512, 20 streams, bptt 35, 40 epochs, lr 20, clip 0.25."""
    return _wikitext2(
        "lstm",
        dropout=0.5,
        settings={
            "seht-h": {"weight": 0.01},
            "seht-d": {"weight": 0.01, "probes": 1, "prob": 0.05},
            "confidence-penalty": {"weight": 0.01},
            "label-smoothing": {"weight": 0.01},
            "dropout": {"rate": 0.5},
        },
        paper="table3",
    )


def wikitext2_gru() -> Recipe:
    """The paper's table 4: the same with a GRU and dropout 0.3."""
    return _wikitext2(
        "gru",
        dropout=0.3,
        settings={
            "seht-h": {"weight": 0.001},
            "seht-d": {"weight": 0.001, "probes": 1, "prob": 0.01},
            "confidence-penalty": {"weight": 0.005},
            "label-smoothing": {"weight": 0.05},
            "dropout": {"rate": 0.3},
        },
        paper="table4",
    )


def _wikitext2(cell: str, *, dropout: float, settings: dict[str, Any], paper: str) -> Recipe:
    return Recipe(
        name=f"wikitext2-{cell}",
        data=DataConfig("wikitext2", bptt=35),
        model=ModelConfig(cell, embedding=512, hidden=512, layers=2, dropout=dropout, init=0.1),
        # No momentum and no weight decay: plain SGD, as in the code base the paper's setting is of.
        optim=OptimConfig(
            lr=20.0, momentum=0.0, weight_decay=0.0, schedule="plateau", gamma=0.25, clip=0.25
        ),
        batch=20,
        epochs=40,
        eval_batch=10,
        settings=settings,
        paper=paper,
    )


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
