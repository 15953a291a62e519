"""Arithmetic: entry by entry, sums, and what has kinks for which there is no rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seht.operators.axes.arithmetic import (
    added_product,
    additive,
    divided,
    divided_by,
    elementwise,
    reduced,
    scaled,
)
from seht.operators.operator import Operator, each, first_alone, jointly
from seht.operators.pieces import LINEAR, modulus
from seht.operators.rules import refused
from seht.tensors.memory import laid_out, layout_of


def _absolute(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is not None or not input.is_complex():
        return torch.abs(input, out=out)
    return modulus(input, input.detach() == 0)


def _log_sums(input: Tensor, dim: Any, *, out: Tensor | None = None) -> Tensor:
    """Running sums in doubling steps: the third derivative of PyTorch's own is NaN."""
    if out is not None or input.is_complex() or not input.dim() or not isinstance(dim, int):
        return torch.logcumsumexp(input, dim, out=out)
    found, step = input.movedim(dim, 0), 1
    while step < len(found):
        both = torch.stack([found[step:], found[:-step]])
        found, step = torch.cat([found[:step], both.logsumexp(0)]), 2 * step
    return laid_out(found.movedim(0, dim), layout_of(input.detach().logcumsumexp(dim)))


def _rounded(*_: Any, rounding_mode: Any = None, **__: Any) -> bool:
    return rounding_mode is not None


def _bounded(x: Any, eps: Any = None, **_: Any) -> bool:
    return eps is not None


_QUOTIENT = refused("with rounding_mode has kinks", _rounded)

OPERATORS = (
    Operator("""
        exp exp_ expm1 log log1p log2 log10 sqrt sqrt_ rsqrt square sin cos tan erf erfc reciprocal
        pow pow_ __pow__ __rpow__ lerp addcdiv atan2 xlogy logaddexp hypot zeros_like ones_like
        empty_like full_like
    """, axes=elementwise),
    Operator("""
        add add_ sub sub_ subtract rsub neg negative __add__ __radd__ __sub__ __rsub__ __neg__
        __iadd__ __isub__ where masked_fill float double
    """, axes=additive, affine=jointly),
    Operator("masked_fill_ half bfloat16 requires_grad_ cpu", axes=additive),
    Operator("mul mul_ multiply multiply_ __mul__ __rmul__ __imul__", axes=scaled, affine=each),
    Operator("addcmul addcmul_", axes=added_product),
    Operator("div div_ divide divide_", _QUOTIENT, divided, first_alone),
    Operator("""
        true_divide true_divide_ __truediv__ __itruediv__ __div__ __idiv__
    """, axes=divided, affine=first_alone),
    Operator("__rdiv__ __rtruediv__", axes=divided_by),
    Operator("sum mean", axes=reduced, affine=jointly, adds=True),
    Operator("nansum", axes=reduced, adds=True),
    Operator("cumsum", affine=jointly),
    Operator("logcumsumexp", safe=lambda _: _log_sums),
    # straight on each piece
    Operator("abs absolute __abs__", LINEAR, elementwise, jointly, safe=lambda _: _absolute),
    Operator("""
        abs_ absolute_ clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ maximum
        minimum fmax fmin
    """, LINEAR, elementwise, jointly),
    Operator("""
        fix fix_ trunc trunc_ round round_ floor floor_ ceil ceil_ frac frac_ sign sign_ sgn sgn_
        angle nan_to_num nan_to_num_ gt_ ge_ lt_ le_ eq_ ne_ greater_ greater_equal_ less_
        less_equal_ not_equal_
    """, LINEAR, elementwise),
    # without a rule
    Operator("""
        copysign copysign_ fmod fmod_ remainder remainder_ __mod__ __rmod__ heaviside heaviside_
        logical_not_ logical_and_ logical_or_ logical_xor_ frexp i0e i1e
        fake_quantize_per_tensor_affine fake_quantize_per_channel_affine
        _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine
        fused_moving_avg_obs_fake_quant
    """, refused("has kinks")),
    Operator("logit logit_", refused("with eps has kinks", _bounded)),
)  # fmt: skip
