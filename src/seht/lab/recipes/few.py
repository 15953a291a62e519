"""Few images: the setting where regularisers matter most."""

from __future__ import annotations

from typing import Any

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe


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
