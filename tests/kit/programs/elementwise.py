"""Activations: as PyTorch has them, and in elementary operations."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from programs.nodes import Function


def on(x: Tensor, condition: Tensor) -> Tensor:
    """1 where the condition holds; no derivative."""
    return condition.to(x.dtype)


def sides(x: Tensor, positive: Tensor, right: Tensor, left: Tensor) -> Tensor:
    mask = on(x, positive)
    return mask * right + (1 - mask) * left


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    # At the edges themselves the derivative is 1, as in PyTorch's clamp.
    inside = on(x, (x >= low) & (x <= high))
    return inside * x + on(x, x < low) * low + on(x, x > high) * high


def hard_clamped(x: Tensor, low: float, high: float) -> Tensor:
    inside = on(x, (x > low) & (x < high))
    return inside * x + on(x, x <= low) * low + on(x, x >= high) * high


def relu(x: Tensor) -> Tensor:
    return on(x, x > 0) * x


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return sides(x, x > 0, x, alpha * (torch.exp(x * on(x, x <= 0)) - 1))


def size(x: Tensor) -> Tensor:
    return x * x.detach().sign()


SELU = 1.0507009873554804934, 1.6732632423543772848

SMOOTH: dict[str, tuple[Function, Function]] = {
    "tanh": (torch.tanh, lambda x: 1 - 2 / (1 + torch.exp(2 * x))),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x))),
    "silu": (F.silu, lambda x: x / (1 + torch.exp(-x))),
    "gelu": (F.gelu, lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "softplus": (F.softplus, lambda x: torch.log(1 + torch.exp(x))),
    "mish": (F.mish, lambda x: x * torch.tanh(torch.log(1 + torch.exp(x)))),
    "logsigmoid": (F.logsigmoid, lambda x: -torch.log(1 + torch.exp(-x))),
    "tanhshrink": (F.tanhshrink, lambda x: x - torch.tanh(x)),
    "softmax": (
        lambda x: F.softmax(x, -1),
        lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
    ),
    "square": (torch.square, lambda x: x * x),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.3), lambda x: x + 0.3 * x * x),
}

KINKED: dict[str, tuple[Function, Function]] = {
    "relu": (F.relu, relu),
    "relu-inplace": (lambda x: x.clone().relu_(), relu),
    "leaky": (lambda x: F.leaky_relu(x, 0.1), lambda x: sides(x, x > 0, x, 0.1 * x)),
    "elu": (F.elu, elu),
    "celu": (lambda x: F.celu(x, 1.5), lambda x: 1.5 * elu(x / 1.5)),
    "selu": (F.selu, lambda x: SELU[0] * elu(x, SELU[1])),
    "relu6": (lambda x: F.relu6(3 * x), lambda x: hard_clamped(3 * x, 0, 6)),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 0.7), lambda x: hard_clamped(x, -0.5, 0.7)),
    "hardsigmoid": (F.hardsigmoid, lambda x: hard_clamped(x + 3, 0, 6) / 6),
    "hardswish": (F.hardswish, lambda x: x * hard_clamped(x + 3, 0, 6) / 6),
    "softsign": (F.softsign, lambda x: x / (1 + size(x))),
    "softshrink": (
        lambda x: F.softshrink(x, 0.2),
        lambda x: on(x, x > 0.2) * (x - 0.2) + on(x, x < -0.2) * (x + 0.2),
    ),
    "hardshrink": (lambda x: F.hardshrink(x, 0.2), lambda x: on(x, (x.abs() > 0.2)) * x),
    "abs": (torch.abs, size),
    "clamp": (lambda x: x.clamp(-0.3, 0.9), lambda x: clamped(x, -0.3, 0.9)),
    "where": (lambda x: torch.where(x > 0.1, x * x, -x), lambda x: sides(x, x > 0.1, x * x, -x)),
    "masked-fill": (
        lambda x: x.masked_fill(x < -0.2, 0.5),
        lambda x: sides(x, x >= -0.2, x, torch.full_like(x, 0.5)),
    ),
    "straight-through": (
        lambda x: x + 0.5 * (x.round() - x).detach(),
        lambda x: x + 0.5 * (x.round() - x).detach(),
    ),
    "no-grad-scale": (
        lambda x: x / no_grad_size(x),
        lambda x: x / (1 + x.detach().abs().mean(-1, keepdim=True)),
    ),
    "maximum": (
        lambda x: torch.maximum(x, 0.5 * x.flip(-1) + 0.1),
        lambda x: sides(x, x >= 0.5 * x.flip(-1) + 0.1, x, 0.5 * x.flip(-1) + 0.1),
    ),
    "competition": (
        lambda x: x * (x >= x.amax(-1, keepdim=True)) + 0.3 * x,
        lambda x: x * on(x, x >= x.amax(-1, keepdim=True)) + 0.3 * x,
    ),
    "normalize": (
        lambda x: F.normalize(x + 0.1, dim=-1),
        lambda x: (x + 0.1) / torch.sqrt(((x + 0.1) ** 2).sum(-1, keepdim=True)),
    ),
}  # fmt: skip


def no_grad_size(x: Tensor) -> Tensor:
    with torch.no_grad():
        return 1 + x.abs().mean(-1, keepdim=True)


ELEMENTWISE = {**SMOOTH, **KINKED}
