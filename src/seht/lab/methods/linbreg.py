"""Linearised Bregman iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from seht.lab.config import Recipe
from seht.lab.methods.base import Method, not_negative, positive
from seht.lab.methods.weight_decay import with_decay


class LinBregMethod(Method):
    r"""LinBreg: gradient steps on a dual variable, soft-thresholded weights.

    .. math:: v \leftarrow v - \tau g, \qquad
              w \leftarrow \mathrm{soft}(\delta v, \delta\lambda)

    Bungert et al., arXiv 2105.04319, whose comparison network (ordinary training) is the paper's
    row "Vanilla"; this is the method that article is about. tau and the momentum are the recipe's,
    without weight decay. Biases and norms are not thresholded. Weights start as they are, with
    :math:`v = w / \delta + \lambda\,\mathrm{sign}(w)`.

    Args:
        weight: lambda, the weight of the l1 norm.
        delta: the weight of the quadratic term is 1 / (2 delta).
    """

    name = "linbreg"

    def __init__(self, *, weight: float = 1e-3, delta: float = 1.0) -> None:
        self.weight, self.delta = not_negative("weight", weight), positive("delta", delta)

    def configure(self, recipe: Recipe) -> Recipe:
        """Weight decay 0, and SGD: its step is one of its own."""
        if recipe.optim.name != "sgd":
            raise ValueError(
                f"linbreg takes the place of SGD, and optim.name is {recipe.optim.name}; leave it "
                "out, or give --optim.name sgd"
            )
        return with_decay(recipe, 0.0)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        groups = []
        for group in optimizer.param_groups:
            kept = {"lr": group["lr"], "momentum": group.get("momentum", 0.0)}
            for weight, tensors in (
                (self.weight, [p for p in group["params"] if p.dim() >= 2]),
                (0.0, [p for p in group["params"] if p.dim() < 2]),
            ):
                if tensors:
                    groups.append({**kept, "params": tensors, "weight": weight})
        return LinBreg(groups, delta=self.delta)


class LinBreg(Optimizer):
    """The optimiser; ``momentum`` is that of ``torch.optim.SGD``, on the dual variable."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight: float = 1e-3,
        delta: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight": weight, "delta": delta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weight, delta = group["weight"], group["delta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, change = self.state[p], p.grad
                if "dual" not in state:
                    state["dual"] = p / delta + weight * p.sign()
                if group["momentum"]:
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    change = state["momentum"].mul_(group["momentum"]).add_(change)
                state["dual"].sub_(change, alpha=group["lr"])
                x = delta * state["dual"]
                p.copy_(x.sign() * (x.abs() - delta * weight).clamp_min(0))
        return loss
