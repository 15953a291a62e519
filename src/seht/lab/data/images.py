"""Image data in memory: uint8 tensors, indexed, augmented and normalised batch by batch."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.lab.config import DataConfig, Recipe
from seht.lab.data import augment, files, labels, pickles
from seht.lab.data.files import DataError
from seht.lab.data.seeds import generator
from seht.lab.methods.base import Batch

POOL = 700  # of the 1797 digits; the others are the test set of every seed


@dataclass(frozen=True)
class Pictures:
    """All images of a data set, uint8, and how they become numbers around zero."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    white: int
    """The largest value of a pixel."""
    mean: tuple[float, ...]
    """Per channel, of the training images, white being 1."""
    std: tuple[float, ...]


class Images:
    """One run's images: which are trained on and which validated on is drawn with its seed."""

    context = 0

    def __init__(self, pictures: Pictures, recipe: Recipe, seed: int, device: str) -> None:
        config = recipe.data
        train, valid = split(config, len(pictures.x))
        order = torch.randperm(len(pictures.x), generator=generator(seed, "split")).to(device)
        given = labels.replaced(pictures.y, pictures.classes, config, seed)
        x, y = pictures.x.to(device), given.to(device)
        # The images themselves are shared between runs; a split is a list of places.
        self._splits = {"train": (x, y, order[train]), "valid": (x, y, order[valid])}
        self.wrong = {
            name: labels.share_wrong(given, pictures.y, places.cpu())
            for name, (_, _, places) in self._splits.items()
            if config.noise and len(places)
        }
        x, y = pictures.x_test.to(device), pictures.y_test.to(device)
        self._splits["test"] = (x, y, torch.arange(len(x), device=device))
        self.classes = pictures.classes
        _, channels, height, width = pictures.x.shape
        if height % config.average or width % config.average:
            raise DataError(
                f"{config.name} has images of {height}x{width}, which squares of data.average "
                f"({config.average}) do not fill; choose a divisor of both"
            )
        self.example: tuple[int, int, int] | None = (
            channels,
            height // config.average,
            width // config.average,
        )
        self.steps_per_epoch = math.ceil(len(self._splits["train"][2]) / recipe.batch)
        self._recipe, self._seed = recipe, seed
        mean, std = torch.tensor(pictures.mean), torch.tensor(pictures.std)
        self._shift = mean.mul(pictures.white).view(-1, 1, 1).to(device)
        self._scale = std.mul(pictures.white).reciprocal().view(-1, 1, 1).to(device)

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """One epoch in its own order, from step `start` on; the last batch may be smaller."""
        config, size = self._recipe.data, self._recipe.batch
        x, y, places = self._splits["train"]
        random = generator(self._seed, "epoch", epoch)
        order = places[torch.randperm(len(places), generator=random).to(x.device)]
        draws = augment.draw(len(order), config.crop, config.flip, random).to(x.device)
        for first in range(start * size, len(order), size):
            part = slice(first, first + size)
            batch = x[order[part]]
            if config.crop or config.flip:
                batch = augment.crop_flip(batch, config.crop, draws[part])
            yield Batch(self._normalise(batch), y[order[part]])

    def eval_batches(self, split: str, limit: int | None = None) -> Iterator[Batch]:
        """A split in its fixed order, as it is; at most `limit` images of it."""
        x, y, places = self._splits[split]
        for part in places[:limit].split(self._recipe.eval_batch):
            if len(part):
                yield Batch(self._normalise(x[part]), y[part])

    def _normalise(self, pixels: Tensor) -> Tensor:
        values = pixels.float()
        if self._recipe.data.average > 1:
            values = F.avg_pool2d(values, self._recipe.data.average)
        return values.sub_(self._shift).mul_(self._scale)


def split(config: DataConfig, count: int) -> tuple[slice, slice]:
    """Which of ``count`` images in the seed's order are trained on, and which validated on.

    The validation images are the last of all, or with ``within`` the last of the ``size`` ones.
    """
    size = count if config.size is None else config.size
    if config.within:
        first, last = size - config.validation, size
    else:
        first, last = count - config.validation, count
        size = first if config.size is None else size
    if first < 1 or last > count or (not config.within and size > first):
        raise DataError(
            f"{config.name} has {count} images to train on: data.size ({size}) and "
            f"data.validation ({config.validation}) are more; lower one of them"
        )
    return slice(0, first if config.within else size), slice(first, last)


# --- the data sets ----------------------------------------------------------------------------


def pictures(name: str, data_dir: str | os.PathLike[str] | None = None) -> Pictures:
    """A data set, read once per process."""
    if name == "digits":
        return _digits()
    # Two of the keys may change where the files are; the cache must not hide that.
    return _cifar(name, str(data_dir) if data_dir else None, os.environ.get("SEHT_DATA"))


@functools.lru_cache(maxsize=1)
def _digits() -> Pictures:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images).to(torch.uint8).view(-1, 1, 8, 8)
    y = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    pool, test = order[:POOL], order[POOL:]
    # Black stays 0: most of each image is background.
    return Pictures(x[pool], y[pool], x[test], y[test], 10, 16, (0.0,), (1.0,))


@functools.lru_cache(maxsize=1)
def _cifar(name: str, data_dir: str | None, _named: str | None) -> Pictures:
    paths = files.find(name, data_dir)
    classes = {"cifar10": 10, "cifar100": 100}[name]
    train = [paths[k] for k in sorted(paths) if k.startswith(("data_batch", "train"))]
    parts = [_read(path, classes) for path in train]
    x, y = (torch.cat(t) for t in zip(*parts, strict=True))
    x_test, y_test = _read(paths["test_batch" if name == "cifar10" else "test"], classes)
    return Pictures(x, y, x_test, y_test, classes, 255, *CIFAR_MOMENTS[name])


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
