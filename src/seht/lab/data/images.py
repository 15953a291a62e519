"""The image data sets: scikit-learn's digits, CIFAR-10, CIFAR-100, and CIFAR-10 as features."""

from __future__ import annotations

import functools
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seht.extras import need
from seht.lab.data import files
from seht.lab.data.examples import Labelled, balanced
from seht.lab.data.files import DataError

POOL = 700  # of the 1797 digits; the others are the test set of every seed


def pictures(name: str, data_dir: str | os.PathLike[str] | None = None) -> Labelled:
    """A data set of images, read once per process."""
    if name == "digits":
        return _digits()
    return _cifar(name, *files.places_of(data_dir))


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
    content = unpickled(path)
    x = torch.tensor(content[b"data"]).view(-1, 3, 32, 32)
    y = torch.tensor(content[b"labels" if classes == 10 else b"fine_labels"])
    assert x.dtype is torch.uint8 and len(x) == len(y) and int(y.max()) < classes
    return x, y


# All that a pickled array needs; any other name could be a way to run code.
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


def unpickled(path: Path) -> dict[bytes, Any]:
    """A pickled dictionary of arrays and lists; strings are bytes, as Python 2 wrote them.

    It is not trusted: nothing but plain values and arrays is made.
    """
    value = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    if not isinstance(value, dict):
        raise DataError(f"{path} holds no dictionary; replace it by the official file")
    return value


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"a data file asks for {module}.{name}, which no array needs, and was not read; "
                "replace it by the official file"
            )
        import numpy

        if name == "_reconstruct":  # where it is today, whichever numpy wrote the file
            return numpy.empty(0).__reduce__()[0]
        return getattr(numpy, name)


SEEN, SEEN_TEST = 2000, 2000  # each takes 7 ms
"""Images for training and for tests that a pretrained network sees: the same for every seed."""


def features(data_dir: str | os.PathLike[str] | None = None) -> Labelled:
    """``cifar10-lite0``: what :func:`seht.lab.models.lite0.bottom` makes of the images."""
    need("finetune", "cifar10-lite0")  # fails before the images are fetched
    return _features(*files.places_of(data_dir))


@functools.lru_cache(maxsize=1)
def _features(data_dir: str | None, _named: str | None) -> Labelled:
    from seht.lab.models.lite0 import bottom

    source = pictures("cifar10", data_dir)
    pool, test = _places(source.y, SEEN), _places(source.y_test, SEEN_TEST)
    x = bottom(source.x[pool])
    none, one = (0.0,) * x.shape[1], (1.0,) * x.shape[1]  # the trained part takes them as they are
    labels = source.y[pool], source.y_test[test]
    return Labelled(x, labels[0], bottom(source.x_test[test]), labels[1], 10, 1, none, one)


def _places(y: Tensor, count: int) -> Tensor:
    """The places of this many images in a fixed random order, as many of each class."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return balanced(order, y)[:count]
