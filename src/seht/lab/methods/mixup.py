"""mixup."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import Beta

from seht.lab.config import KINDS
from seht.lab.methods.base import Batch, Method, positive


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
