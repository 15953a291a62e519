"""CIFAR-10 images as the frozen part of a pretrained network sees them, once per process."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from seht.extras import need
from seht.lab.data import images
from seht.lab.data.examples import Labelled, balanced

POOL, TEST = 2000, 2000
"""How many training and test images are used, the same for every seed; each takes 7 ms."""


def features(data_dir: str | os.PathLike[str] | None = None) -> Labelled:
    """``cifar10-lite0``: what :func:`seht.lab.models.lite0.bottom` makes of the images."""
    need("finetune", "cifar10-lite0")  # fails before the images are fetched
    return _features(str(data_dir) if data_dir else None, os.environ.get("SEHT_DATA"))


@functools.lru_cache(maxsize=1)
def _features(data_dir: str | None, _named: str | None) -> Labelled:
    from seht.lab.models.lite0 import bottom

    source = images.pictures("cifar10", data_dir)
    pool, test = _places(source.y, POOL), _places(source.y_test, TEST)
    x = bottom(source.x[pool])
    none, one = (0.0,) * x.shape[1], (1.0,) * x.shape[1]  # the trained part takes them as they are
    labels = source.y[pool], source.y_test[test]
    return Labelled(x, labels[0], bottom(source.x_test[test]), labels[1], 10, 1, none, one)


def _places(y: Tensor, count: int) -> Tensor:
    """The places of this many images in a fixed random order, as many of each class."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return balanced(order, y)[:count]
