"""Activations. Those that are smooth on each side of a kink are given as formulas: ``sided`` ones
take the sides that the centre recorded; the others are run by their parts, in the centre, too.
"""

from __future__ import annotations

import math
from collections.abc import Container
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.arithmetic import elementwise, within
from seht.operators.axes import Call
from seht.operators.operator import Operator, each, jointly
from seht.operators.pieces import LINEAR, RELU, sided
from seht.operators.rules import composed, write_back


def elu_sides(
    x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Where ELU is straight, and where it is 0 with another slope than 1."""
    # To autograd the slope at 0 is that of the curve, and the second derivative 0.
    return x >= 0, None if alpha * input_scale == 1 else x == 0


def elu(
    sides: tuple[Tensor, Tensor | None],
    x: Tensor,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
) -> Tensor:
    """ELU on the recorded sides."""
    straight, zero = sides
    scale = 1.0 if isinstance(scale, bool) else scale  # F.elu has its ``inplace`` there
    curve = alpha * torch.expm1(input_scale * x.masked_fill(straight, 0))
    line = x if zero is None else torch.where(zero, alpha * input_scale * x, x)
    return scale * torch.where(straight, line, curve)


_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def prelu(pos: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """PReLU on the recorded side."""
    if weight.numel() > 1 and x.dim() > 1:
        weight = weight.view(1, -1, *(1,) * (x.dim() - 2))
    return torch.where(pos, x, weight * x)


def _safe_prelu(input: Tensor, weight: Tensor) -> Tensor:
    # At 0 the fused double backward takes another side than the backward.
    return prelu(input > 0, input, weight)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """CELU by ELU."""
    # By elu in the centre, too: the fused gradient rounds alpha to float32, whatever the dtype.
    y = alpha * F.elu(input / alpha)
    return write_back(input, y, inplace)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    r""":math:`x \, \mathrm{relu6}(x + 3) / 6`: a smooth factor times a piecewise linear one."""
    x = input.clone() if inplace else input
    # ... which F.hardsigmoid is as well, but without the second derivative that hardswish has.
    y = x * F.relu6(x + 3) / 6
    return write_back(input, y, inplace)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    # The fused operator has no double backward.
    return write_back(input, F.relu6(input + 3) / 6, inplace)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Softplus by comparisons, which are frozen."""
    x = beta * input
    curved = torch.log1p(torch.exp(input.masked_fill(x >= threshold, 0) * beta)) / beta
    # To autograd the slope at the threshold is the curve's, and the second derivative 0.
    slope = 1 / (1 + math.exp(-threshold))
    corner = (math.log1p(math.exp(threshold)) + slope * (x - threshold)) / beta
    return torch.where(x > threshold, input, torch.where(x == threshold, corner, curved))


def softsign(input: Tensor) -> Tensor:
    """Softsign by the modulus."""
    return input / (1 + input.abs())


def _along(call: Call, rank: int) -> Container[int]:
    dim = call.argument(1, "dim")
    return (dim % rank,) if isinstance(dim, int) else range(rank)


OPERATORS = (
    Operator("relu relu_", RELU, elementwise, jointly),
    # straight on each piece
    Operator("""
        relu6 relu6_ leaky_relu leaky_relu_ hardtanh hardtanh_ threshold _threshold threshold_
    """, LINEAR, elementwise, jointly),
    Operator("hardshrink softshrink", LINEAR, elementwise),
    Operator("hardsigmoid", LINEAR, elementwise, safe=lambda _: _hardsigmoid),
    Operator(
        "hardsigmoid_", LINEAR, elementwise,
        safe=lambda _: partial(_hardsigmoid, inplace=True),
    ),
    Operator("rrelu rrelu_", LINEAR, elementwise, random=True),
    # smooth on each side
    Operator("elu elu_", sided(elu, elu_sides), elementwise),
    Operator("selu selu_", sided(
        lambda sides, x, *_: elu(sides, x, *_SELU), lambda x, *_: elu_sides(x, *_SELU)
    ), elementwise),
    Operator("prelu", sided(prelu), affine=each, safe=lambda _: _safe_prelu),
    Operator("celu", composed(celu), elementwise),
    Operator("celu_", composed(partial(celu, inplace=True)), elementwise),
    Operator("hardswish", composed(hardswish), elementwise),
    Operator("hardswish_", composed(partial(hardswish, inplace=True)), elementwise),
    Operator("softsign", composed(softsign), elementwise),
    # straight above the threshold: from 20, the usual one, that changes it by 2e-9
    Operator("softplus", composed(
        softplus, lambda input, beta=1.0, threshold=20.0: threshold < 15
    ), elementwise),
    # smooth everywhere
    Operator("gelu silu mish sigmoid sigmoid_ tanh tanh_ logsigmoid tanhshrink", axes=elementwise),
    Operator("softmax log_softmax softmin", axes=within(_along)),
)  # fmt: skip
