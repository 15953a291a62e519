"""Methods that wrap the optimiser, or take its place: SAM, Lookahead, LinBreg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from seht.lab.config import Recipe
from seht.lab.methods.base import Closure, Method, Run, at_least, not_negative, positive, share
from seht.lab.methods.settings import with_decay
from seht.replay.state import BorrowedBuffers


class Sam(Method):
    r"""The gradient from the edge of a ball around the weights: two passes a step.

    It is taken at :math:`w + \rho\, g / \lVert g \rVert`, and applied at w.

    Foret et al., arXiv 2010.01412; the optimiser is pytorch_optimizer's. BatchNorm statistics move
    in the first pass only. The second pass draws its own dropout masks.

    Args:
        rho: the radius.
        adaptive: measure it relative to each weight (ASAM, arXiv 2102.11600).
    """

    name = "sam"
    passes = 2

    def __init__(self, *, rho: float = 0.05, adaptive: bool = False) -> None:
        self.rho, self.adaptive = not_negative("rho", rho), adaptive

    def setup(self, run: Run) -> None:
        """Its buffers have to stay in the second pass."""
        self.model = run.model

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        return sharpness_aware(optimizer, self.model, rho=self.rho, adaptive=self.adaptive)


class Asam(Sam):
    r"""SAM in a ball measured relative to each weight.

    .. math:: w + \rho\, \frac{w^2 g}{\lVert\, |w|\, g\, \rVert}

    (products entry by entry) in place of SAM's :math:`w + \rho\, g / \lVert g \rVert`: the same for
    a layer and for that layer scaled up with the next one scaled down. Kwon et al., arXiv
    2102.11600, whose rho for CIFAR-10 is the default; without their eta, so that weights at 0 stay.

    Args:
        rho: the radius.
    """

    name = "asam"
    excludes = frozenset({"sam"})

    def __init__(self, *, rho: float = 0.5) -> None:
        super().__init__(rho=rho, adaptive=True)


def sharpness_aware(optimizer: Optimizer, model: nn.Module, **options: Any) -> Optimizer:
    """SAM that leaves the model's buffers alone in its second pass."""
    from pytorch_optimizer import SAM  # takes seconds to import

    groups = [dict(group) for group in optimizer.param_groups]
    sam: Optimizer = SAM(groups, type(optimizer), **options)
    sam.register_step_pre_hook(lambda _, args, kwargs: (_still(model, *args, **kwargs), {}))
    return sam


def _still(model: nn.Module, sam: Optimizer, closure: Closure) -> tuple[Optimizer, Closure]:
    def again() -> Any:
        with BorrowedBuffers(model):
            return closure()

    return sam, again


class Lookahead(Method):
    r"""Slow weights that follow the fast ones every k steps.

    Every k steps :math:`slow \leftarrow slow + \alpha (fast - slow)`, then fast = slow.

    Zhang et al., arXiv 1907.08610; the optimiser is pytorch_optimizer's.

    Args:
        k: fast steps to a slow one.
        alpha: the slow step.
    """

    name = "lookahead"

    def __init__(self, *, k: int = 5, alpha: float = 0.8) -> None:
        self.k, self.alpha = at_least("k", k, 1), share("alpha", alpha, one=True)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        from pytorch_optimizer import Lookahead as Wrapper  # takes seconds to import

        wrapped: Optimizer = Wrapper(optimizer, k=self.k, alpha=self.alpha)
        return wrapped


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
