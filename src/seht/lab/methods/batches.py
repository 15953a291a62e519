"""Methods that change a batch: Cutout and mixup."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import Beta

from seht.lab.config import KINDS
from seht.lab.methods.base import Batch, Method, at_least, positive


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


class Mixup(Method):
    r"""Mixtures of two images, with the labels of both in proportion.

    Train on :math:`s x_i + (1 - s) x_{\pi(i)}`.

    Zhang et al., arXiv 1710.09412: one s ~ Beta(alpha, alpha) and one permutation per batch, before
    the forward pass. Of a pretrained network's features where the recipe trains on these.

    Args:
        alpha: 1 in the paper (s is uniform).
    """

    name = "mixup"
    tasks = frozenset(KINDS) - {"text"}

    def __init__(self, *, alpha: float = 1.0) -> None:
        self.alpha = positive("alpha", alpha)

    def batch(self, batch: Batch, step: int) -> Batch:
        share = Beta(self.alpha, self.alpha).sample().item()
        order = torch.randperm(len(batch.x), device=batch.x.device)
        return mixed(batch, order, share)


def mixed(batch: Batch, order: Tensor, share: float) -> Batch:
    """The batch mixed with itself in another order."""
    x = share * batch.x + (1 - share) * batch.x[order]
    return replace(batch, x=x, other=batch.y[order], share=share)
