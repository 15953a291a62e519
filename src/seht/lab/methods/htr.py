"""Hessian-trace regularisation as in arXiv 2012.03801: the paper's Middle Network Method."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from seht import HessianTrace
from seht.errors import PenaltyWarning
from seht.estimators import SehtH as Estimator
from seht.lab.methods.base import at_least, share
from seht.lab.methods.trace import TracePenalty


class HtrMiddle(TracePenalty):
    r"""The trace of the middle half of the parameter tensors, every 50th step.

    Tensors n // 4 to 3 n // 4 of ``named_parameters()``, norm scales and biases included; Gaussian
    probes; every 50th step of the last three quarters of training. arXiv 2012.03801, and "Middle
    Network Method" in the paper.

    Args:
        weight: gamma, on the steps that are penalised.
        probes: on such a step.
        every: how many steps lie between.
        start: the share of training that comes before.
    """

    name = "htr-middle"
    excludes = frozenset({"htr-full"})

    def __init__(
        self, *, weight: float = 1e-5, probes: int = 3, every: int = 50, start: float = 0.25
    ) -> None:
        super().__init__(
            # HessianTrace makes up for skipped steps with the weight, this method does not.
            weight=weight / at_least("every", every, 1),
            estimator=Estimator(probes=probes, distribution="gaussian"),
            every=every,
            warmup=share("start", start, one=False) or 0,
        )

    def make(self, model: nn.Module, **changes: Any) -> HessianTrace:
        """Without warnings: rare steps and their weight are part of the method."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenaltyWarning)
            return super().make(model, **changes)

    def params(self, model: nn.Module) -> list[str]:
        names = tensors(model)
        return names[len(names) // 4 : 3 * len(names) // 4]


class HtrFull(HtrMiddle):
    r"""The trace of all parameter tensors, every 50th step: arXiv 2012.03801, "full network".

    Args:
        weight: gamma, on the steps that are penalised.
        probes: on such a step.
        every: how many steps lie between.
        start: the share of training that comes before.
    """

    name = "htr-full"
    excludes = frozenset({"htr-middle"})

    def __init__(
        self, *, weight: float = 1e-6, probes: int = 3, every: int = 50, start: float = 0.25
    ) -> None:
        super().__init__(weight=weight, probes=probes, every=every, start=start)

    def params(self, model: nn.Module) -> list[str]:
        return tensors(model)


def tensors(model: nn.Module) -> list[str]:
    """The names of what is trained, in the model's order."""
    return [name for name, p in model.named_parameters() if p.requires_grad]
