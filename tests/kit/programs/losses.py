"""Losses of (N, K) outputs: the user's call, and the formula. All are means over examples."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from programs.elementwise import on, relu, size


class Data(NamedTuple):
    """What the losses compare with."""

    labels: Tensor
    targets: Tensor

    def of(self, examples: slice) -> "Data":
        return Data(self.labels[examples], self.targets[examples])

    @property
    def signs(self) -> Tensor:
        return self.targets.sign()

    @property
    def shares(self) -> Tensor:
        return self.targets.sigmoid()


class Loss(NamedTuple):
    user: Callable[[Tensor, Data], Tensor]
    plain: Callable[[Tensor, Data], Tensor]
    curved: bool = True
    """Whether the second derivative in the outputs is anything but 0."""
    apart: bool = True
    """Whether it is a mean over examples."""


def log_softmax(z: Tensor) -> Tensor:
    return z - torch.log(torch.exp(z).sum(1, keepdim=True))


def picked(z: Tensor, labels: Tensor) -> Tensor:
    return (z * F.one_hot(labels, z.shape[1])).sum(1)


def average(x: Tensor) -> Tensor:
    return x.sum() / x.numel()


def cross_entropy(z: Tensor, d: Data) -> Tensor:
    return -average(picked(log_softmax(z), d.labels))


def smoothed(z: Tensor, d: Data) -> Tensor:
    return 0.8 * cross_entropy(z, d) - 0.2 * average(log_softmax(z))


def huber(d: Tensor, delta: float) -> Tensor:
    inner = on(d, d.abs() <= delta)
    return average(inner * 0.5 * d * d + (1 - inner) * delta * (size(d) - 0.5 * delta))


def margins(z: Tensor, d: Data) -> Tensor:
    others = 1 - F.one_hot(d.labels, z.shape[1])
    return average((others * relu(1 - picked(z, d.labels)[:, None] + z)).sum(1) / z.shape[1])


def bce(z: Tensor, t: Tensor) -> Tensor:
    return average(torch.log(1 + torch.exp(z)) - t * z)


LOSSES: dict[str, Loss] = {
    "cross-entropy": Loss(lambda z, d: F.cross_entropy(z, d.labels), cross_entropy),
    "smoothed": Loss(
        lambda z, d: F.cross_entropy(z, d.labels, label_smoothing=0.2), smoothed
    ),
    "mse": Loss(lambda z, d: F.mse_loss(z, d.targets), lambda z, d: average((z - d.targets) ** 2)),
    "bce": Loss(
        lambda z, d: F.binary_cross_entropy_with_logits(z, d.shares),
        lambda z, d: bce(z, d.shares),
    ),
    "huber": Loss(
        lambda z, d: F.huber_loss(z, d.targets, delta=0.5), lambda z, d: huber(z - d.targets, 0.5)
    ),
    "smooth-l1": Loss(
        lambda z, d: F.smooth_l1_loss(z, d.targets), lambda z, d: huber(z - d.targets, 1.0)
    ),
    "soft-margin": Loss(
        lambda z, d: F.soft_margin_loss(z, d.signs),
        lambda z, d: average(torch.log(1 + torch.exp(-d.signs * z))),
    ),
    "kl": Loss(
        lambda z, d: F.kl_div(z.log_softmax(1), d.targets.softmax(1), reduction="batchmean"),
        lambda z, d: average(
            (d.targets.softmax(1) * (d.targets.log_softmax(1) - log_softmax(z))).sum(1)
        ),
    ),
    "poisson": Loss(
        lambda z, d: F.poisson_nll_loss(z, d.shares),
        lambda z, d: average(torch.exp(z) - d.shares * z),
    ),
    "squared-hinge": Loss(
        lambda z, d: F.relu(1 - d.signs * z).square().mean(),
        lambda z, d: average(relu(1 - d.signs * z) ** 2),
    ),
    "l1": Loss(
        lambda z, d: F.l1_loss(z, d.targets), lambda z, d: average(size(z - d.targets)), False
    ),
    "hinge": Loss(
        lambda z, d: (1 - d.signs * z).clamp(min=0).mean(),
        lambda z, d: average(relu(1 - d.signs * z)),
        False,
    ),
    "multi-margin": Loss(lambda z, d: F.multi_margin_loss(z, d.labels), margins, False),
    "linear": Loss(lambda z, d: (z * d.targets).mean(), lambda z, d: average(z * d.targets), False),
    "root-mse": Loss(
        lambda z, d: F.mse_loss(z, d.targets).sqrt(),
        lambda z, d: torch.sqrt(average((z - d.targets) ** 2)),
        apart=False,
    ),
    "root-mse-swapped": Loss(
        lambda z, d: torch.sqrt(F.mse_loss(d.targets, z)),
        lambda z, d: torch.sqrt(average((z - d.targets) ** 2)),
        apart=False,
    ),
}  # fmt: skip
"""``nll`` is not here: it needs a model that ends in a log-softmax."""

NLL = Loss(lambda z, d: F.nll_loss(z, d.labels), lambda z, d: -average(picked(z, d.labels)))
