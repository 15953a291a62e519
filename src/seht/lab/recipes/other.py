"""Data that are no images, out of packages: a table and a set of time series, seconds for a run.

200 examples are drawn with the seed out of 300, 40 of them for validation; the other examples of
the package's data are the test set of every seed.
"""

from __future__ import annotations

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe
from seht.lab.recipes.few import gauss_newton


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
