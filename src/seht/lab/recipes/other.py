"""Data other than images, and your own: no recipe here needs a download.

Tables and series come out of packages: 200 examples are drawn with the seed out of 300, 40 of them
for validation; the other examples of the package's data are the test set of every seed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe
from seht.lab.recipes.few import cifar10_low, gauss_newton


def cancer() -> Recipe:
    """scikit-learn's breast cancer data, 30 numbers a case, and an MLP of two hidden layers."""
    return _small("cancer", ModelConfig("mlp", width=64, layers=2))


def italy_power() -> Recipe:
    """Days of Italy's power demand, 24 figures each, winter or summer, and two convolutions."""
    return _small("italy-power", ModelConfig("cnn", width=32, norm="none"), epochs=200)


def _small(name: str, model: ModelConfig, epochs: int = 60) -> Recipe:
    # Epochs enough to fit wrong labels, too: at 40 % the training loss ends below 0.1.
    return Recipe(
        name=name,
        data=DataConfig(name, size=200, validation=40, within=True),
        model=model,
        optim=OptimConfig(lr=0.05, momentum=0.9, weight_decay=5e-4, schedule="cosine"),
        batch=20,
        epochs=epochs,
        threads=1,
        settings={"seht-h": gauss_newton(1e-2), "seht-s": gauss_newton(1e-2)},
    )


def own_table() -> Recipe:
    """Your own table (--data.file mine.csv or mine.npz) with cancer's MLP."""
    return _own("own-table", cancer())


def own_series() -> Recipe:
    """Your own time series (--data.file mine.npz) with italy-power's two convolutions."""
    return _own("own-series", italy_power())


def own_images() -> Recipe:
    """Your own images (--data.file mine.npz) with cifar10-low's ResNet-18 of width 8."""
    return _own("own-images", cifar10_low())


def _own(name: str, like: Recipe) -> Recipe:
    # No weight is known to fit them: the trace goes by the default share.
    trace: dict[str, Any] = {"share": 2.0, "curvature": "ggn", "warmup": 0.1}
    data = DataConfig(name, validation=100, within=True)
    settings = {"seht-h": trace, "seht-s": trace}
    return dataclasses.replace(like, name=name, data=data, settings=settings)


def pydocs() -> Recipe:
    """A small LSTM on Python's own documentation: a language model that needs no download."""
    return Recipe(
        name="pydocs",
        data=DataConfig("pydocs", bptt=35, vocabulary=2000),
        model=ModelConfig("lstm", embedding=64, hidden=64, layers=2, dropout=0.2),
        optim=OptimConfig(
            lr=20.0, momentum=0.0, weight_decay=0.0, schedule="plateau", gamma=0.25, clip=0.25
        ),
        batch=20,
        epochs=6,
        eval_batch=10,
    )


def gpt_small() -> Recipe:
    """A small GPT with AdamW on 30,000 tokens of Python's own documentation, which it memorises.

    Its validation loss is lowest after a third of the training, at 4.0, and ends at 5.7, where the
    training loss is 1.1. On WikiText-2: ``--data.name wikitext2 --data.validation 10000``.
    """
    return Recipe(
        name="gpt-small",
        data=DataConfig("pydocs", size=30_000, bptt=64, vocabulary=2000),
        model=ModelConfig("gpt", embedding=64, layers=2, heads=4),
        optim=OptimConfig(
            name="adamw",
            lr=3e-3,
            weight_decay=0.01,
            beta2=0.99,
            schedule="onecycle",
            clip=1.0,
        ),
        batch=16,
        epochs=30,
        eval_batch=16,
        threads=1,  # as fast as two on a network this narrow
    )
