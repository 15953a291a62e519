"""Small data sets other than images: a table and a set of time series, out of packages."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from seht.extras import need
from seht.lab.data.examples import Labelled
from seht.lab.data.files import DataError

POOL = 300
"""Examples to train and validate on; the others are the test set of every seed."""


def table(name: str) -> Labelled:
    """A data set by its name, read once per process."""
    if name == "italy-power":
        need("series", name)  # outside of the cache, as for the features of images
    return {"cancer": _cancer, "italy-power": _italy_power}[name]()


@functools.lru_cache(maxsize=1)
def _cancer() -> Labelled:
    """scikit-learn's breast cancer data: 569 cases, 30 numbers each, malignant or benign."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return divided(torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y), POOL)


@functools.lru_cache(maxsize=1)
def _italy_power() -> Labelled:
    """Days of 24 hourly figures of Italy's power demand: winter or summer, 1,096 of them.

    They come with the package aeon, both of its parts in one; aeon itself is not imported, so that
    none of what it depends on has to be there.
    """
    (package,) = importlib.util.find_spec("aeon").submodule_search_locations  # type: ignore
    folder = Path(package, "datasets", "data", "ItalyPowerDemand")
    parts = [_series(folder / f"ItalyPowerDemand_{part}.ts") for part in ("TRAIN", "TEST")]
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    return divided(x, y, POOL)


def _series(path: Path) -> tuple[Tensor, Tensor]:
    """A file of lines ``number,number,...:class``, below a header that ends in ``@data``."""
    try:
        _, _, lines = path.read_text(encoding="utf-8").partition("@data\n")
        rows = [line.rpartition(":") for line in lines.split()]
        x = torch.tensor([[[float(number) for number in row.split(",")]] for row, _, _ in rows])
        y = torch.tensor([int(label) - 1 for _, _, label in rows])
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); install the package again: pip install --no-deps "
            "--force-reinstall aeon"
        ) from error
    return x, y


def divided(x: Tensor, y: Tensor, pool: int, white: int = 1) -> Labelled:
    """Split off the test set, the same for every seed: all but ``pool`` examples."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    ours, test = order[:pool], order[pool:]
    return scaled(x[ours], y[ours], x[test], y[test], white)


def scaled(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, white: int = 1) -> Labelled:
    """Scale by the examples that are not the test set; a constant column is only shifted."""
    values = x.double().transpose(0, 1).flatten(1) / white  # channels, or columns
    std = values.std(1)
    return Labelled(
        *(x, y, x_test, y_test),
        classes=int(torch.cat([y, y_test]).max()) + 1,
        white=white,
        mean=tuple(values.mean(1).tolist()),
        std=tuple(std.where(std > 0, 1.0).tolist()),
    )
