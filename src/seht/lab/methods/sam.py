"""Sharpness-aware minimisation."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from seht.lab.methods.base import Closure, Method, Run
from seht.lab.methods.checks import not_negative
from seht.replay.buffers import BorrowedBuffers


class Sam(Method):
    r"""The gradient at :math:`w + \rho\, g / \lVert g \rVert`, applied at w: two passes a step.

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
        """SAM around the same optimiser with the same groups."""
        return sharpness_aware(optimizer, self.model, rho=self.rho, adaptive=self.adaptive)


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
