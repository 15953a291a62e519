"""The optimiser of a recipe, before a method changes or wraps it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from seht.lab.config import OptimConfig

OPTIMIZERS = ("sgd", "adamw")


def make(optim: OptimConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    """SGD or AdamW over all of these; the learning rate is set anew for every epoch."""
    if optim.name == "sgd":
        return torch.optim.SGD(
            params, optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay
        )
    return torch.optim.AdamW(  # Loshchilov and Hutter, arXiv 1711.05101
        params,
        optim.lr,
        betas=(optim.momentum, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
