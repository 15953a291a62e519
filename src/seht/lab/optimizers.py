"""The optimiser of a recipe, before a method changes or wraps it, and its learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from seht.lab.config import OptimConfig

RISE, FIRST = 0.3, 1 / 25  # of onecycle, the usual ones


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


def rate(optim: OptimConfig, epochs: int, epoch: int, losses: Sequence[float]) -> float:
    r"""The learning rate of an epoch (from 0); ``losses`` are the validation losses before it.

    =========  =====================================================================
    cosine     :math:`\tfrac{\eta}{2} (1 + \cos(\pi e / E))`, one value per epoch, no restarts
    onecycle   from :math:`\eta / 25` up to :math:`\eta` over 30 % of the epochs, then down to 0,
               both along a cosine (arXiv 1708.07120), one value per epoch
    steps      :math:`\eta \gamma^m` with m milestones behind us (the Wide ResNet's 60, 120, 160)
    plateau    :math:`\eta \gamma^m` with m epochs whose validation loss was no new best
    constant   :math:`\eta`
    =========  =====================================================================

    There is no state to save: a resumed run asks again.
    """
    if optim.schedule == "cosine":
        return optim.lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
    if optim.schedule == "onecycle":
        place, top = epoch / epochs, RISE
        if place < top:
            return optim.lr * (FIRST + (1 - FIRST) * (1 - math.cos(math.pi * place / top)) / 2)
        return optim.lr * (1 + math.cos(math.pi * (place - top) / (1 - top))) / 2
    if optim.schedule == "steps":
        return optim.lr * optim.gamma ** sum(epoch >= m for m in optim.milestones)
    if optim.schedule == "plateau":
        worse, best = 0, math.inf
        for loss in losses:
            worse += not loss < best
            best = min(best, loss)
        return optim.lr * optim.gamma**worse
    return optim.lr
