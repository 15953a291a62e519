r"""Learning rates as a function of the epoch and of the validation losses so far.

=========  =========================================================================
cosine     :math:`\tfrac{\eta}{2} (1 + \cos(\pi e / E))`, one value per epoch, no restarts
onecycle   from :math:`\eta / 25` up to :math:`\eta` over 30 % of the epochs, then down to 0,
           both along a cosine (arXiv 1708.07120), one value per epoch
steps      :math:`\eta \gamma^m` with m milestones behind us (the Wide ResNet's 60, 120, 160)
plateau    :math:`\eta \gamma^m` with m epochs whose validation loss was no new best
constant   :math:`\eta`
=========  =========================================================================

There is no state to save: a resumed run asks again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from seht.errors import unknown
from seht.lab.config import OptimConfig

SCHEDULES = ("cosine", "onecycle", "steps", "plateau", "constant")
RISE, FIRST = 0.3, 1 / 25  # of onecycle, the usual ones


def rate(optim: OptimConfig, epochs: int, epoch: int, losses: Sequence[float]) -> float:
    """The learning rate of an epoch (from 0); ``losses`` are the validation losses before it."""
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
    if optim.schedule == "constant":
        return optim.lr
    raise ValueError(unknown("schedule", optim.schedule, SCHEDULES))
