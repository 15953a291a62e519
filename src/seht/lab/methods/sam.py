"""Sharpness-aware minimisation, in a ball and in one relative to the weights."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from seht.lab.methods.base import Closure, Method, Run, not_negative
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
