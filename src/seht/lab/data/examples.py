"""Labelled data in memory: tensors, indexed, augmented and normalised batch by batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.lab.config import DataConfig, Recipe
from seht.lab.data.files import DataError
from seht.lab.methods.base import Batch


@dataclass(frozen=True)
class Labelled:
    """All examples of a data set, and how they become numbers around zero."""

    x: Tensor
    """One row each: images (uint8, with channels, height and width), series, or plain numbers."""
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    white: int
    """The largest value of a pixel; 1 where there are none."""
    mean: tuple[float, ...]
    """Per channel, or per number, of the training examples, white being 1."""
    std: tuple[float, ...]


class Examples:
    """One run's examples: which are trained on and which validated on is drawn with its seed."""

    context = 0

    def __init__(self, source: Labelled, recipe: Recipe, seed: int, device: str) -> None:
        config = recipe.data
        train, valid = split(config, len(source.x))
        order = torch.randperm(len(source.x), generator=generator(seed, "split")).to(device)
        if config.balanced:
            order = balanced(order, source.y.to(device))
        given = replaced(source.y, source.classes, config, seed)
        x, y = source.x.to(device), given.to(device)
        # The examples themselves are shared between runs; a split is a list of places.
        self._splits = {"train": (x, y, order[train]), "valid": (x, y, order[valid])}
        self.wrong = {
            name: share_wrong(given, source.y, places.cpu())
            for name, (_, _, places) in self._splits.items()
            if config.noise and len(places)
        }
        x, y = source.x_test.to(device), source.y_test.to(device)
        self._splits["test"] = (x, y, torch.arange(len(x), device=device))
        self.classes = source.classes
        first, *rest = source.x.shape[1:]
        if any(side % config.average for side in rest):
            raise DataError(
                f"{config.name} has images of {'x'.join(map(str, rest))}, which squares of "
                f"data.average ({config.average}) do not fill; choose a divisor of both"
            )
        self.example: tuple[int, ...] | None = (first, *(side // config.average for side in rest))
        self.steps_per_epoch = math.ceil(len(self._splits["train"][2]) / recipe.batch)
        self._recipe, self._seed = recipe, seed
        mean, std = torch.tensor(source.mean), torch.tensor(source.std)
        shape = (-1, *(1 for _ in rest))
        self._shift = mean.mul(source.white).view(shape).to(device)
        self._scale = std.mul(source.white).reciprocal().view(shape).to(device)

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """One epoch in its own order, from step `start` on; the last batch may be smaller."""
        config, size = self._recipe.data, self._recipe.batch
        x, y, places = self._splits["train"]
        random = generator(self._seed, "epoch", epoch)
        order = places[torch.randperm(len(places), generator=random).to(x.device)]
        drawn = draw(len(order), config.crop, config.flip, random)
        drawn = Draws(*(choice.to(x.device) for choice in drawn))
        for first in range(start * size, len(order), size):
            part = slice(first, first + size)
            batch = x[order[part]]
            if config.crop or config.flip:
                draws = Draws(*(choice[part] for choice in drawn))
                batch = crop_flip(batch, config.crop, draws)
            yield Batch(self._normalise(batch), y[order[part]])

    def eval_batches(self, split: str, limit: int | None = None) -> Iterator[Batch]:
        """A split in its fixed order, as it is; at most `limit` of them."""
        x, y, places = self._splits[split]
        for part in places[:limit].split(self._recipe.eval_batch):
            if len(part):
                yield Batch(self._normalise(x[part]), y[part])

    def _normalise(self, raw: Tensor) -> Tensor:
        values = raw.float()
        if self._recipe.data.average > 1:
            values = F.avg_pool2d(values, self._recipe.data.average)
        return values.sub_(self._shift).mul_(self._scale)


def balanced(order: Tensor, y: Tensor) -> Tensor:
    """The same places, one of each class in turn: the first k times so many have k of each."""
    found = y[order]
    turn = torch.empty_like(order)
    for label in found.unique():
        mine = found == label
        turn[mine] = torch.arange(int(mine.sum()), device=order.device)
    return order[torch.argsort(turn, stable=True)]


def split(config: DataConfig, count: int) -> tuple[slice, slice]:
    """Which of ``count`` examples in the seed's order are trained on, and which validated on.

    The validation examples are the last of all, or with ``within`` the last of the ``size`` ones.
    """
    size = count if config.size is None else config.size
    if config.within:
        first, last = size - config.validation, size
    else:
        first, last = count - config.validation, count
        size = first if config.size is None else size
    if first < 1 or last > count or (not config.within and size > first):
        asked = "" if config.size is None else f"data.size ({config.size}) and "
        raise DataError(
            f"{config.name} has {count} examples to train on, too few for {asked}data.validation "
            f"({config.validation}); lower {'one of them' if asked else 'it'}"
        )
    return slice(0, first if config.within else size), slice(first, last)


def generator(*what: int | str) -> torch.Generator:
    """A generator for this purpose: any change of seed, name or epoch gives an unrelated one.

    Data never depends on the global random state.
    """
    made = hashlib.sha256(repr(what).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(made[:8], "big", signed=True))


# --- wrong labels -----------------------------------------------------------------------------

# Each image draws for itself, whatever the size of the training data and whichever split it is in:
# more images, or none for validation, leave the labels of the others as they are, and with a larger
# fraction every label that was replaced before still is.


def replaced(y: Tensor, classes: int, config: DataConfig, seed: int) -> Tensor:
    """The labels with ``noise`` of them replaced; those given are left alone.

    ``uniform``: drawn anew from all classes, so that 1 - 1 / classes of the replaced are wrong.
    ``pair``: the next class, and the first after the last.
    """
    if not config.noise:
        return y
    draw = generator(seed, "labels")
    chosen = torch.rand(len(y), generator=draw, dtype=torch.float64) < config.noise
    if config.noise_kind == "pair":
        other = (y + 1) % classes
    else:
        other = torch.randint(classes, y.shape, generator=draw, dtype=y.dtype)
    return torch.where(chosen, other, y)


def share_wrong(given: Tensor, true: Tensor, places: Tensor) -> float:
    """The fraction of these labels that are not the true ones."""
    return (given[places] != true[places]).double().mean().item()


# --- random crops and flips of a whole batch at once ------------------------------------------

# The pixels are those of the recipe's original order: pad with black, crop, flip, then normalise.


class Draws(NamedTuple):
    """The random choices for some images: one entry each."""

    dy: Tensor
    """Rows cut off above, of the padded image: 0 .. 2 * padding."""
    dx: Tensor
    flip: Tensor


def draw(count: int, padding: int, flip: bool, generator: torch.Generator) -> Draws:
    """The choices for `count` images. The same numbers are drawn whatever is switched off."""
    dy, dx = torch.randint(2 * padding + 1, (2, count), generator=generator)
    coin = torch.randint(2, (count,), generator=generator).bool()
    return Draws(dy, dx, coin if flip else torch.zeros_like(coin))


def crop_flip(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """Shift each image by its own draw, black coming in from the border, and mirror some."""
    count, _, height, width = images.shape
    if padding:
        padded = torch.nn.functional.pad(images, (padding,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # every crop, as views
        images = windows[torch.arange(count, device=images.device), :, draws.dy, draws.dx]
    return torch.where(draws.flip.view(-1, 1, 1, 1), images.flip(3), images)
