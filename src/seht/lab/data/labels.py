"""Wrong labels: some of them replaced at random, by the seed and nothing else.

Each image draws for itself, whatever the size of the training data and whichever split it is in:
more images, or none for validation, leave the labels of the others as they are, and with a larger
fraction every label that was replaced before is so still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seht.lab.config import DataConfig
from seht.lab.data.seeds import generator


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
