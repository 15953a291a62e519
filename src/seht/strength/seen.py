"""The gradients that a look found, and the inner products that weights are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seht.distributed import Ranks
from seht.strength.products import Preconditioner, Vector
from seht.tensors.dtensors import local

LOSS, TRACE, HELD_OUT = "loss", "trace", "held-out loss"
"""The functions whose gradients can be looked at."""


@dataclass(frozen=True)
class Seen:
    """What a look found: the gradients of the loss, of the trace, of the held-out loss."""

    parameters: Mapping[str, Tensor]
    loss: Vector
    trace: Vector
    held_out: Vector
    metric: Preconditioner
    ranks: Ranks
    losses: tuple[Tensor, ...] = ()
    """The losses on training and held-out data, if both were looked at."""
    calls: int = 1
    """How many calls make up the optimiser step."""

    def means(self) -> list[float]:
        """The losses, the same on all ranks."""
        values = torch.stack([loss.detach().double().cpu() for loss in self.losses])
        return [float(x) for x in self.ranks.mean(values)]

    def products(self, *pairs: tuple[Vector, Vector]) -> list[float]:
        """Inner products, the same on all ranks."""
        found = [self.metric.inner(a, b, self.parameters) for a, b in pairs]
        leaves = list(self.parameters.values())
        return [float(x) for x in self.ranks.products(torch.stack(found), leaves)]

    def averaged(self, gradient: Vector) -> Vector:
        """The mean over ranks; a weight without a gradient on some rank counts as 0 there."""
        given = self.parameters.items()
        parts = [gradient[n] if n in gradient else torch.zeros_like(local(p)) for n, p in given]
        return dict(zip(self.parameters, self.ranks.averaged(parts), strict=True))
