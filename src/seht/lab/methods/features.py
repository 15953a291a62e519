"""Methods on feature maps, by hooks: DropBlock, and the redundancy of channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.lab.methods.base import Batch, Forward, Method, Run, at_least, not_negative, share

PLACES = {
    # After the norms: dropping commutes with the ReLU behind them.
    "BasicBlock": ("norm1", "norm2", "shortcut"),
    "WideBlock": ("conv1", "conv2", "shortcut"),
    "SmallBlock": ("norm",),
}
"""Where a residual block has its convolutions' outputs and its shortcut."""


class DropBlock(Method):
    r"""Squares of feature maps are dropped, at a growing rate.

    One in place of each seed that is drawn with probability

    .. math:: \gamma = \frac{1 - keep}{b^2} \frac{f^2}{(f - b + 1)^2} .

    Ghiasi, Lin and Le, arXiv 1810.12890: b the block's side, clipped to the map's side f. In the
    last group of blocks, and at a quarter of the rate in the one before it, on the outputs of
    convolutions and on shortcuts; the rate grows linearly from 0 over the training.

    Args:
        size: the side of a block.
        keep: the share of features that is kept at the end of training.
        ramp: whether the rate grows; false: the same rate from the first step on.
    """

    name = "dropblock"
    tasks = frozenset({"image"})

    def __init__(self, *, size: int = 7, keep: float = 0.9, ramp: bool = True) -> None:
        self.size, self.ramp = at_least("size", size, 1), ramp
        self.rate = 1 - share("keep", keep, one=True)
        self.now = 0.0
        """The rate of this step; a step that runs several times keeps it."""

    def setup(self, run: Run) -> None:
        self.steps = run.steps
        found = list(places(run.model))
        if not found:
            raise ValueError(
                f"dropblock knows no feature maps in a {type(run.model).__name__}; add its blocks "
                "to seht.lab.methods.features.PLACES, or leave the method out"
            )
        for module, part in found:
            module.register_forward_hook(self._hook(part))

    def _hook(self, part: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(module: nn.Module, _: object, output: Tensor) -> Tensor:
            rate = part * self.now
            return drop_blocks(output, self.size, 1 - rate) if module.training and rate else output

        return hook

    def batch(self, batch: Batch, step: int) -> Batch:
        """Only looks at the step."""
        self.now = self.rate * (min(1.0, step / max(1, self.steps - 1)) if self.ramp else 1.0)
        return batch


def drop_blocks(x: Tensor, size: int, keep: float) -> Tensor:
    """Seeds are drawn for each example and channel, where a whole block fits."""
    mask = block_mask(x, size, keep)
    return x * mask * (mask.numel() / mask.sum().clamp_min(1))


@torch.no_grad()
def block_mask(x: Tensor, size: int, keep: float) -> Tensor:
    """0 where a block lies, 1 elsewhere."""
    height, width = x.shape[-2:]
    b, c = min(size, height), min(size, width)
    rows, columns = height - b + 1, width - c + 1
    gamma = (1 - keep) / (b * c) * (height * width) / (rows * columns)
    corners = torch.rand(*x.shape[:-2], rows, columns, dtype=x.dtype, device=x.device) < gamma
    # A place is dropped if one of the b x c corners up and left of it is a seed.
    padded = F.pad(corners.to(x.dtype), (c - 1, c - 1, b - 1, b - 1))
    return 1 - F.max_pool2d(padded, (b, c), stride=1)


def places(model: nn.Module) -> Iterator[tuple[nn.Module, float]]:
    """The modules whose outputs are dropped from, with their part of the rate."""
    groups = reversed(list(getattr(model, "layers", [])))
    for group, part in zip(groups, (1.0, 0.25), strict=False):
        for block in group if isinstance(group, nn.Sequential) else [group]:
            for name in PLACES.get(type(block).__name__, ()):
                module = getattr(block, name)
                if module is not None:
                    yield module, part


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
