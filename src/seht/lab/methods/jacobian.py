"""Jacobian regularisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.lab.config import KINDS
from seht.lab.methods.base import Forward, Method, at_least, not_negative


class Jacobian(Method):
    r"""The squared norm of the logits' derivative in the input, added to the loss.

    Cross-entropy plus :math:`\lambda R`, with
    :math:`R = \frac12 \mathrm{mean}_i \lVert \partial z_i / \partial x_i \rVert_F^2` of the logits.

    Hoffman et al., arXiv 1908.02729.

    Args:
        weight: lambda.
        projections: random ones for the estimate; 0 takes all K classes, which is exact.
    """

    name = "jacobian"
    tasks = frozenset(KINDS) - {"text"}
    input_gradient = True

    def __init__(self, *, weight: float = 0.01, projections: int = 1) -> None:
        self.weight = not_negative("weight", weight)
        self.projections = at_least("projections", projections, 0)

    def term(self, forward: Forward) -> Tensor:
        """With the graph of the closure's own forward pass."""
        norm = squared_jacobian(forward.batch.x, forward.logits, self.projections)
        return self.weight * norm / 2


def squared_jacobian(x: Tensor, z: Tensor, projections: int) -> Tensor:
    r"""The mean over examples of :math:`\lVert J_i \rVert_F^2`, differentiable.

    With v uniform on the unit sphere :math:`E \lVert v^T J \rVert^2 = \lVert J \rVert_F^2 / K`, so
    that K times the mean over the projections is unbiased. All examples share one backward pass:
    with BatchNorm their derivatives in each other are counted too, as in the authors' code.
    """
    classes = z.shape[1]
    total = z.new_zeros(())
    for k in range(projections or classes):
        if projections:
            v = F.normalize(torch.randn_like(z), dim=1)
        else:
            v = torch.zeros_like(z)
            v[:, k] = 1
        (row,) = torch.autograd.grad((v * z).sum(), x, create_graph=True)
        total = total + row.square().sum()
    scale = classes / projections if projections else 1.0
    return scale * total / len(z)
