"""The image data sets: scikit-learn's digits, CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from seht.lab.data import files, pickles
from seht.lab.data.examples import Labelled

POOL = 700  # of the 1797 digits; the others are the test set of every seed


def pictures(name: str, data_dir: str | os.PathLike[str] | None = None) -> Labelled:
    """A data set of images, read once per process."""
    if name == "digits":
        return _digits()
    # Two of the keys may change where the files are; the cache must not hide that.
    return _cifar(name, str(data_dir) if data_dir else None, os.environ.get("SEHT_DATA"))


@functools.lru_cache(maxsize=1)
def _digits() -> Labelled:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images).to(torch.uint8).view(-1, 1, 8, 8)
    y = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    pool, test = order[:POOL], order[POOL:]
    # Black stays 0: most of each image is background.
    return Labelled(x[pool], y[pool], x[test], y[test], 10, 16, (0.0,), (1.0,))


@functools.lru_cache(maxsize=1)
def _cifar(name: str, data_dir: str | None, _named: str | None) -> Labelled:
    paths = files.find(name, data_dir)
    classes = {"cifar10": 10, "cifar100": 100}[name]
    train = [paths[k] for k in sorted(paths) if k.startswith(("data_batch", "train"))]
    parts = [_read(path, classes) for path in train]
    x, y = (torch.cat(t) for t in zip(*parts, strict=True))
    x_test, y_test = _read(paths["test_batch" if name == "cifar10" else "test"], classes)
    return Labelled(x, y, x_test, y_test, classes, 255, *CIFAR_MOMENTS[name])


CIFAR_MOMENTS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Mean and standard deviation of each channel over all pixels of all training images."""


def _read(path: Path, classes: int) -> tuple[Tensor, Tensor]:
    content = pickles.load(path)
    x = torch.tensor(content[b"data"]).view(-1, 3, 32, 32)
    y = torch.tensor(content[b"labels" if classes == 10 else b"fine_labels"])
    assert x.dtype is torch.uint8 and len(x) == len(y) and int(y.max()) < classes
    return x, y
