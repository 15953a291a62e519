"""What the convolutional networks are made of: activations, norms and convolutions by name."""

from __future__ import annotations

import math
from collections.abc import Callable

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
