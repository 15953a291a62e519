"""Cutout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seht.lab.methods.base import Batch, Method, at_least


class Cutout(Method):
    """Zero a square of every image: centre uniform over all pixels, clipped at the border.

    DeVries and Taylor, arXiv 1708.04552; after normalisation, so that 0 is the mean.

    Args:
        size: the side; half the image's height if not given (16 on CIFAR, as in the paper's
            table 1; its CIFAR-100 uses 8).
    """

    name = "cutout"
    tasks = frozenset({"image"})

    def __init__(self, *, size: int | None = None) -> None:
        self.size = None if size is None else at_least("size", size, 1)

    def batch(self, batch: Batch, step: int) -> Batch:
        count, _, height, width = batch.x.shape
        rows = torch.randint(height, (count,), device=batch.x.device)
        columns = torch.randint(width, (count,), device=batch.x.device)
        return replace(batch, x=cut(batch.x, rows, columns, self.size or max(1, height // 2)))


def cut(x: Tensor, rows: Tensor, columns: Tensor, size: int) -> Tensor:
    """Zero the square around ``(rows[i], columns[i])`` of image i, from centre - size // 2 on."""
    hit = _covered(x.shape[2], rows, size)[:, None, :, None]
    return x.masked_fill(hit & _covered(x.shape[3], columns, size)[:, None, None, :], 0)


def _covered(length: int, centres: Tensor, size: int) -> Tensor:
    offset = torch.arange(length, device=centres.device) - centres[:, None] + size // 2
    return (offset >= 0) & (offset < size)
