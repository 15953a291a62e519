"""Stand-ins for the two losses of MM + FRL, arXiv 2011.10951: minimax and feature redundancy."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from seht.lab.methods.base import Forward, Method, Run, not_negative
from seht.lab.methods.loss import over_labels

_SPATIAL = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)


class FeatureRedundancy(Method):
    r"""Cross-entropy plus lambda times the mean squared cosine between pairs of channels.

    Of the last feature map: the output of the network's last part with a convolution or a norm on
    images. A **stand-in** for the redundancy part of MM + FRL (arXiv 2011.10951), whose formulas
    are not public in reachable form; the paper's figure for MM + FRL is not this method's.

    Args:
        weight: lambda.
    """

    name = "feature-redundancy"
    tasks = frozenset({"image"})

    def __init__(self, *, weight: float = 0.01) -> None:
        self.weight = not_negative("weight", weight)
        self.features: list[Tensor] = []

    def setup(self, run: Run) -> None:
        """A hook that keeps the features until the closure asks for them."""
        last_spatial(run.model).register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, _: object, output: Tensor) -> None:
        if module.training:
            self.features[:] = [output]

    def term(self, forward: Forward) -> Tensor:
        """Lets go of the features: they hold the graph."""
        return self.weight * squared_cosines(self.features.pop()).mean()


def last_spatial(model: nn.Module) -> nn.Module:
    """The last child that works on maps."""
    found = [
        child
        for child in model.children()
        if any(isinstance(part, _SPATIAL) for part in child.modules())
    ]
    if not found:
        raise ValueError("feature-redundancy needs a convolutional network; leave it out")
    return found[-1]


def squared_cosines(maps: Tensor, fade: float = 0.01) -> Tensor:
    r"""For each example the mean over pairs of channels :math:`i \neq j` of :math:`\cos^2_{ij}`.

    A channel with hardly any energy, below ``fade`` of the mean, fades out: the angle of what is
    nearly zero has a curvature without bounds, which no Hessian penalty beside it would survive.

    With unit rows A, :math:`\lVert A A^T \rVert_F = \lVert A^T A \rVert_F`, and the smaller of the
    two is computed.
    """
    rows = maps.flatten(2)
    channels = rows.shape[1]
    energy = rows.square().sum(2, keepdim=True)
    rows = rows / (energy + fade * energy.mean(1, keepdim=True) + 1e-12).sqrt()
    other = rows.transpose(1, 2)
    gram = rows @ other if channels <= rows.shape[2] else other @ rows
    own = rows.square().sum(2).square().sum(1)
    return (gram.square().sum((1, 2)) - own) / (channels * (channels - 1))


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
