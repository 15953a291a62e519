"""A stand-in for the minimax loss of arXiv 2011.10951."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seht.lab.methods.base import Forward, Method
from seht.lab.methods.checks import not_negative
from seht.lab.methods.loss import over_labels


class NontargetUniform(Method):
    r"""Wrong classes are to be equally likely (a stand-in for MM + FRL).

    Cross-entropy plus :math:`\lambda\,KL(u \,\Vert\, q)`.

    q is p restricted to the wrong classes and renormalised, u uniform on them. A **stand-in** for
    the minimax part of MM + FRL (arXiv 2011.10951), whose formulas are not public in reachable
    form; the paper's figure for MM + FRL is not this method's.

    Args:
        weight: lambda.
    """

    name = "nontarget-uniform"

    def __init__(self, *, weight: float = 0.01) -> None:
        self.weight = not_negative("weight", weight)

    def term(self, forward: Forward) -> Tensor:
        """For mixed labels the mix of both divergences."""
        return self.weight * over_labels(
            forward.batch, lambda y: nontarget_divergence(forward.logits, y).mean()
        )


def nontarget_divergence(logits: Tensor, y: Tensor) -> Tensor:
    r""":math:`KL = -\log(K - 1) - \frac{1}{K - 1} \sum_{k \neq y} \log q_k` of each example."""
    wrong = logits.shape[1] - 1
    target = torch.zeros_like(logits, dtype=torch.bool).scatter(1, y[:, None], True)
    total = torch.logsumexp(logits.masked_fill(target, -math.inf), dim=1)
    mean = logits.masked_fill(target, 0).sum(1) / wrong
    return total - mean - math.log(wrong)
