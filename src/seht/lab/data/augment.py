"""Random crops and flips of a whole batch at once, on whatever device it is.

The pixels are those of the recipe's original order: pad with black, crop, flip, then normalise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
