"""Our own experiments: few images, tables, series, texts, and your own data.

Only those with CIFAR-10 in their name, and finetune, need a download. Tables and series come out of
packages: 200 examples are drawn with the seed out of 300, 40 of them for validation; the other
examples of the package's data are the test set of every seed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe

# --- few images: where regularisers matter most -----------------------------------------------


def cifar10_low() -> Recipe:
    """2,000 images, no augmentation, a small ResNet: the setting where regularisers matter most."""
    return Recipe(
        name="cifar10-low",
        data=DataConfig("cifar10", size=2000, validation=1000),
        model=ModelConfig("resnet18", width=8),
        optim=OptimConfig(lr=0.1, momentum=0.9, weight_decay=5e-4, schedule="onecycle"),
        batch=128,
        epochs=40,
        threads=1,  # two runs side by side take less time than one after the other on two
        settings={
            # A tenth of the training plain, then every other step. The full Hessian's trace can go
            # below zero and wants a smaller weight than the Gauss-Newton part (1e-3).
            "seht-h": {"weight": 1e-4, "every": 2, "warmup": 64},
            "seht-d": {"weight": 1e-3, "probes": 1, "prob": 0.05, "warmup": 64},
            "sam": {"rho": 0.1},
        },
    )


def cifar10_16() -> Recipe:
    """2,000 images averaged to 16x16, a fifth of them for validation: a minute for a run."""
    return Recipe(
        name="cifar10-16",
        data=DataConfig("cifar10", size=2000, validation=400, within=True, average=2),
        model=ModelConfig("resnet18", width=8),
        optim=OptimConfig(lr=0.1, momentum=0.9, weight_decay=5e-4, schedule="onecycle"),
        batch=128,
        epochs=40,
        threads=1,
        settings={
            "seht-h": gauss_newton(3e-3),
            "sam": {"rho": 0.1},
            "cutout": {"size": 8},
        },
    )


def finetune() -> Recipe:
    """50 CIFAR-10 images a class and EfficientNet-Lite0 with its ImageNet weights: a minute a run.

    Enlarged to 96x96; the stem and eleven of the sixteen blocks are frozen, and what they make of
    2,000 training and 2,000 test images is kept in memory. 10 a class: ``--data.size 100
    --data.validation 20``. The last layer alone: ``--model.name lite0-linear``.
    """
    return Recipe(
        name="finetune",
        data=DataConfig("cifar10-lite0", size=500, validation=100, within=True, balanced=True),
        model=ModelConfig("lite0"),
        # Pooled features have a norm of 44: with a larger rate the last layer jumps about, and the
        # others follow it. Chosen on validation images, with other seeds than those that judge.
        optim=OptimConfig(lr=0.005, momentum=0.9, weight_decay=5e-4, schedule="cosine"),
        batch=40,
        epochs=10,
        threads=1,
        settings={"seht-h": gauss_newton(1e-4)},
    )


def gauss_newton(weight: float) -> dict[str, Any]:
    """The Gauss-Newton trace where it has proved itself: a tenth plain, then every second step."""
    return {"weight": weight, "curvature": "ggn", "every": 2, "warmup": 0.1}


def digits() -> Recipe:
    """300 of scikit-learn's 8x8 digits and a network of 6,090 numbers: seconds for a run.

    The settings were chosen on validation images, with other seeds than a comparison begins with.
    """
    return Recipe(
        name="digits",
        data=DataConfig("digits", size=300, validation=400),
        model=ModelConfig("cnn", width=16, norm="none"),
        optim=OptimConfig(lr=0.05, momentum=0.9, weight_decay=5e-4, schedule="cosine"),
        batch=50,
        epochs=60,
        threads=1,  # tensors this small gain nothing from a second one
        settings={
            # Early on the trace says little about the minimum to come, and at the end the loss goes
            # to zero: the penalty must not outgrow it.
            "seht-h": {"weight": 0.01, "warmup": 50, "limit": 1.0},
            "seht-d": {"weight": 10.0, "warmup": 50, "limit": 1.0},
            "sam": {"rho": 0.1},
            "nso": {"sigma": 0.03},
            "confidence-penalty": {"weight": 0.3},
            "cutout": {"size": 2},
            "dropblock": {"size": 3},
            "dropout": {"rate": 0.5},
        },
    )


# --- data other than images, and your own -----------------------------------------------------


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
