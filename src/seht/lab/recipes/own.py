"""Your own data, ``--data.file mine.npz``, with network and schedule of a recipe of their shape."""

from __future__ import annotations

import dataclasses
from typing import Any

from seht.lab.config import DataConfig, Recipe
from seht.lab.recipes.few import cifar10_low
from seht.lab.recipes.other import cancer, italy_power


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
