"""The optimiser of a recipe, before a method changes or wraps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from seht.lab.config import OptimConfig


def make(optim: OptimConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    """SGD or AdamW over all of these; the learning rate is set anew for every epoch."""
    return OPTIMIZERS[optim.name](optim, params)


def _sgd(optim: OptimConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(
        params, optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay
    )


def _adamw(optim: OptimConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    """Loshchilov and Hutter, arXiv 1711.05101."""
    return torch.optim.AdamW(
        params,
        optim.lr,
        betas=(optim.momentum, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )


OPTIMIZERS: dict[str, Callable[[OptimConfig, Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}
"""Every optimiser by its name."""
