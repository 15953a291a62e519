"""The data of the experiments: everything in memory, batches made of tensor operations.

data = load(recipe, seed=0)
for batch in data.train_batches(epoch=0): ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

from seht.lab.config import Recipe
from seht.lab.data.files import DataError
from seht.lab.methods.base import Batch

__all__ = ["Data", "DataError", "load"]


class Data(Protocol):
    """What the loop and the models need to know of data, labelled examples or text."""

    classes: int
    """The number of classes, or of words."""
    example: tuple[int, ...] | None
    """Channels, height and width of an image, channels and length of a series, the columns of a
    table; ``None`` for text."""
    steps_per_epoch: int
    context: int
    """Text: tokens in the longest stretch; 0 otherwise."""
    wrong: dict[str, float]
    """The fraction of labels that were replaced by wrong ones, by split; empty without noise."""

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """An epoch's batches; order and augmentation depend on (seed, epoch) and nothing else.

        With ``start``, those from that step on. The hidden state of text is the loop's to fill in.
        """

    def eval_batches(self, split: str, limit: int | None = None) -> Iterator[Batch]:
        """``"train"``, ``"valid"`` or ``"test"`` in its fixed order, not augmented.

        ``limit``: at most so many examples; or text up to the stretch that reaches so many tokens.
        With ``data.validation`` 0 the validation split is empty, but for text.
        """


def load(
    recipe: Recipe,
    seed: int,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
) -> Data:
    """The data of a run; files are found or fetched, and verified, by :mod:`.files`."""
    from seht.lab.data import examples, images, own, tables, text

    if recipe.task == "text":
        return text.Text(text.corpus(recipe.data, data_dir), recipe, device)
    name = recipe.data.name
    if name.startswith("own-"):
        source = own.own(recipe.data, data_dir)
    elif recipe.task == "features":
        source = images.features(data_dir)
    else:
        source = images.pictures(name, data_dir) if recipe.task == "image" else tables.table(name)
    return examples.Examples(source, recipe, seed, device)
