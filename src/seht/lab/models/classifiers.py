"""The classifiers: ResNet-18, Wide ResNet, a small network for 8x8 images, and an MLP.

The convolutional ones take ``(batch, channels, height, width)`` and return logits. In each of them
``layers`` is everything between the stem and the head, so that its output is the last feature map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.errors import unknown
from seht.lab.config import NORMS

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


def activated(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of this name."""
    if name not in ACTIVATIONS:
        raise ValueError(unknown("activation", name, ACTIVATIONS))
    return ACTIVATIONS[name]


def normed(name: str, channels: int, dims: int = 2) -> nn.Module:
    """The norm of this name; ``"none"`` is for shallow networks."""
    if name == "batch":
        return nn.BatchNorm1d(channels) if dims == 1 else nn.BatchNorm2d(channels)
    if name == "group":  # some 16 channels to a group, whatever the width
        return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)
    if name == "none":
        return nn.Identity()
    raise ValueError(unknown("norm", name, NORMS))


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size (over the stride), without bias: a norm follows."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def stages(
    block: type[nn.Module], inputs: int, sizes: Sequence[int], counts: Sequence[int], *options: Any
) -> nn.Sequential:
    """Groups of blocks of these sizes; each but the first halves height and width."""
    found = nn.Sequential()
    for place, (outputs, count) in enumerate(zip(sizes, counts, strict=True)):
        group = nn.Sequential()
        for number in range(count):
            stride = 2 if place > 0 and number == 0 else 1
            group.append(block(inputs, outputs, stride, *options))
            inputs = outputs
        found.append(group)
    return found


# --- ResNet-18 --------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """conv, norm, activation, (dropout,) conv, norm, plus the shortcut; then the activation."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, dropout: float, norm: str, activation: str
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride), normed(norm, outputs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3), normed(norm, outputs)
        self.act = activated(activation)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), normed(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after the activation."""
        y = self.dropout(self.act(self.norm1(self.conv1(x))))
        return self.act(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet with a CIFAR stem (3x3, stride 1, no pooling); ``width`` 64 is the usual one.

    ``dropout`` goes where Wide ResNets have it; the usual ResNet-18 has none.
    """

    def __init__(
        self,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        *,
        classes: int = 10,
        width: int = 64,
        dropout: float = 0.0,
        norm: str = "batch",
        activation: str = "relu",
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(channels, width, 3), normed(norm, width)
        self.act = activated(activation)
        sizes = [width * 2**i for i in range(len(blocks))]
        self.layers = stages(BasicBlock, width, sizes, blocks, dropout, norm, activation)
        self.linear = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.act(self.norm1(self.conv1(x))))
        return self.linear(x.mean((2, 3)))


def resnet18(**options: Any) -> ResNet:
    """ResNet-18: four layers of two blocks; 11,173,962 parameters with 10 classes."""
    return ResNet((2, 2, 2, 2), **options)


# --- Wide ResNet ------------------------------------------------------------------------------


class WideBlock(nn.Module):
    """norm, activation, conv, norm, activation, dropout, conv, plus the shortcut."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, dropout: float, norm: str, activation: str
    ) -> None:
        super().__init__()
        self.norm1, self.conv1 = normed(norm, inputs), conv(inputs, outputs, 3, stride)
        self.norm2, self.conv2 = normed(norm, outputs), conv(outputs, outputs, 3)
        self.act, self.dropout = activated(activation), nn.Dropout(dropout)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, before the next block's norm and activation."""
        y = self.act(self.norm1(x))
        # As in the original: a projection sees the activated input, an identity the raw one.
        skip = x if self.shortcut is None else self.shortcut(y)
        y = self.act(self.norm2(self.conv1(y)))
        return self.conv2(self.dropout(y)) + skip


class WideResNet(nn.Module):
    """WRN-depth-factor, pre-activation; WRN-28-10 has 36,536,884 parameters with 100 classes."""

    def __init__(
        self,
        depth: int = 28,
        factor: int = 10,
        *,
        classes: int = 100,
        dropout: float = 0.0,
        width: int = 16,
        norm: str = "batch",
        activation: str = "relu",
        channels: int = 3,
    ) -> None:
        super().__init__()
        count, rest = divmod(depth - 4, 6)
        if rest or count < 1:
            raise ValueError(
                f"the depth of a Wide ResNet is 6n + 4 (10, 16, 22, 28 ...), not {depth}"
            )
        self.conv1 = conv(channels, width, 3)
        sizes = [width * factor * 2**i for i in range(3)]
        self.layers = stages(WideBlock, width, sizes, 3 * [count], dropout, norm, activation)
        self.norm, self.act = normed(norm, sizes[-1]), activated(activation)
        self.linear = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.layers(self.conv1(x))))
        return self.linear(x.mean((2, 3)))


# --- a small network for small images ---------------------------------------------------------


class CNN(nn.Module):
    """Two times convolution, norm, activation and pooling, then a linear layer.

    With ``width`` 16 and no norm it has 6,090 numbers on 8x8 images: trained in a second, and more
    than a few hundred images can pin down. ``dims`` 1 is for series.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        width: int = 16,
        dropout: float = 0.0,
        norm: str = "none",
        activation: str = "relu",
        channels: int = 1,
        size: int = 8,
        dims: int = 2,
    ) -> None:
        super().__init__()
        if size % 4:
            raise ValueError(f"the cnn halves its input twice: {size} is not a multiple of 4")
        self.layers = nn.Sequential(
            SmallBlock(channels, width, norm, activation, dims),
            SmallBlock(width, 2 * width, norm, activation, dims),
        )
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.linear = nn.Linear(2 * width * (size // 4) ** dims, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(self.layers(x).flatten(1)))


class SmallBlock(nn.Module):
    """conv, norm, activation, and the maximum of each 2x2 square, or pair."""

    def __init__(
        self, inputs: int, outputs: int, norm: str, activation: str, dims: int = 2
    ) -> None:
        super().__init__()
        conv, pool = (nn.Conv1d, nn.MaxPool1d) if dims == 1 else (nn.Conv2d, nn.MaxPool2d)
        # A norm would take the bias away again.
        self.conv = conv(inputs, outputs, 3, padding=1, bias=norm == "none")
        self.norm, self.act = normed(norm, outputs, dims), activated(activation)
        self.pool = pool(2)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, half as high and wide."""
        return self.pool(self.act(self.norm(self.conv(x))))


class MLP(nn.Module):
    """Linear layers of these sizes with an activation in between; images are flattened."""

    def __init__(self, *sizes: int, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(
                f"an MLP needs at least two sizes, such as MLP(784, 100, 10), not {sizes}"
            )
        self.linears = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.act = activated(activation)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for linear in self.linears[:-1]:
            x = self.act(linear(x))
        return self.linears[-1](self.dropout(x))
