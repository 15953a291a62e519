"""Arithmetic: entry by entry, sums, and what has kinks for which there is no rule; and how the
examples go through it, and through functions that work along some dimensions of each.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.operators.axes import Axis, Broken, Call, Follow, Sum, Tag, bends, couples, first_of
from seht.operators.operator import Operator, each, first_alone, jointly
from seht.operators.pieces import LINEAR, modulus
from seht.operators.rules import Mode, first, refused, untaped
from seht.tensors.memory import laid_out, layout_of

# --- entry by entry -------------------------------------------------------------------------------


def _aligned(call: Call, tensors: Iterable[Any]) -> tuple[list[Tag], list[Tag]]:
    """The tags of these arguments, their axes aligned from the right as broadcasting does; and
    those alone of what depends on a weight.
    """
    rank = call.out.dim()
    every, varying = [], []
    for tensor in tensors:
        tag = call.tag(tensor) if isinstance(tensor, Tensor) else None
        if tag is None:
            continue
        if isinstance(tag, Axis):
            tag = _stretched(tag.at(tag.dim + rank - tensor.dim()), tensor, call.out)
        every.append(tag)
        if call.varies(tensor):
            varying.append(tag)
    return every, varying


def _stretched(axis: Axis, tensor: Tensor, out: Tensor) -> Tag:
    """One example alone, repeated along its axis by broadcasting."""
    size = tensor.shape[axis.dim - out.dim()]
    if size == out.shape[axis.dim]:
        return axis
    owner = axis.owner[0] if axis.owner else 0
    return Axis(axis.dim, 1, (owner,) * out.shape[axis.dim])


def _one_axis(tags: list[Tag]) -> Tag | None:
    """The axis that all of them have; None if they differ."""
    return tags[0] if tags and all(tag == tags[0] for tag in tags) else None


def _together(call: Call, tensors: Iterable[Any], *, linear: bool) -> Tag | None:
    """Entry by entry on several tensors: one axis, if they have the same.

    Without one the entries are sums over examples where the function is ``linear`` in all of its
    arguments together; in any other they are coupled.
    """
    every, varying = _aligned(call, tensors)
    if not every:
        return None
    total = first_of(Sum, varying)
    if total is None:
        # A constant belongs to whom we like.
        found = _one_axis(every) or _one_axis(varying)
        if found is not None:
            return found
        if not varying:
            return None
    if not linear:
        return couples(call) if total is None else bends(call, total)
    return Sum(call.name) if total is None else total


def elementwise(call: Call) -> Tag | None:
    """One axis for all arguments."""
    return _together(call, call.given, linear=False)


def additive(call: Call) -> Tag | None:
    """A sum of sums is one, and so is the sum of different examples."""
    return _together(call, call.given, linear=True)


def copied(call: Call) -> Tag | None:
    """copy_: what was there before does not matter."""
    return _together(call, [call.argument(1, "src", call.kwargs.get("other"))], linear=True)


def _product(call: Call, factors: list[Any], over: tuple[Any, ...] = ()) -> Tag | None:
    """A sum over examples may be multiplied by what they share, and divided by it."""
    _, varying = _aligned(call, factors)
    total = first_of(Sum, varying)
    if total is None or len(varying) > 1 or first_of((Axis, Sum), _aligned(call, over)[1]):
        return _together(call, [*factors, *over], linear=False)
    return total


def scaled(call: Call) -> Tag | None:
    """A product."""
    return _product(call, list(call.given))


def divided(call: Call) -> Tag | None:
    """A quotient: a sum over examples may be divided, but not divide."""
    return _product(call, [call.main()[0]], (call.argument(1, "other"),))


def divided_by(call: Call) -> Tag | None:
    """The same with the arguments the other way round: 1 / x."""
    return _product(call, [call.argument(1, "other")], (call.main()[0],))


def added_product(call: Call) -> Tag | None:
    """addcmul: x + value * a * b."""
    x, a, b = call.main()[0], call.argument(1, "tensor1"), call.argument(2, "tensor2")
    if first_of(Sum, call.beside()) is None:
        return elementwise(call)
    product = _product(call, [a, b])
    return product if isinstance(product, Broken) else _together(call, [x, a, b], linear=True)


# --- reductions -----------------------------------------------------------------------------------


def reduced(call: Call) -> Tag | None:
    """Sum and mean along dimensions; over the examples they give a sum over them."""
    x, axis = call.main()
    if not isinstance(axis, Axis):
        return axis
    dims = call.argument(1, "dim")
    total = Sum(call.name)
    if isinstance(dims, torch.dtype) or dims is None or dims == ():
        return total
    gone = {d % x.dim() for d in ((dims,) if isinstance(dims, int) else tuple(dims))}
    if axis.dim in gone or not gone:
        return total
    kept = call.out.dim() == x.dim()
    return axis if kept else axis.at(axis.dim - sum(d < axis.dim for d in gone))


# --- along some dimensions of each example --------------------------------------------------------


def within(features: Callable[[Call, int], Container[int]]) -> Follow:
    """Functions that work along some dimensions of each example and leave the others alone:
    ``features`` says which, given the call and the rank of the tensor it works on.
    """

    def follow(call: Call) -> Tag | None:
        x, axis = call.main()
        others = call.beside(x)
        total = first_of(Sum, [axis, *others])
        if total is not None:
            return bends(call, total)
        if others or (isinstance(axis, Axis) and axis.dim in features(call, x.dim())):
            return couples(call)  # a scale or a shift that the examples have made
        return axis

    return follow


# --- the rows ------------------------------------------------------------------------------------


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


def _evened(mode: Mode, func: Any, args: Any, kwargs: Any) -> Tensor:
    """The exponential of a matrix; its gradient is brought to size 1 on the way in, and back.

    A difference sends gradients of order 1 / e^2 through the closure's graph. Nearly every backward
    pass is linear to the last bit, so their size does not matter. Here it does: this one takes the
    exponential of a block matrix with matrix and gradient in it, and a large gradient swamps the
    matrix.
    """
    x = first(args, kwargs)
    plain = torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.requires_grad
    if plain or is_functorch_wrapped_tensor(x):
        return func(*args, **kwargs)
    sizes: list[Tensor] = []

    def shrink(gradient: Tensor) -> Tensor:
        size = gradient.detach().abs().amax((-2, -1), keepdim=True)
        sizes[:] = [torch.where(size > 0, size, 1.0)]
        return gradient / sizes[0]

    own = x.view_as(x)
    own.register_hook(lambda gradient: gradient * sizes[0])
    y: Tensor = func(own)
    y.register_hook(shrink)
    return y


_QUOTIENT = refused(
    "with rounding_mode has kinks",
    lambda *_, rounding_mode=None, **__: rounding_mode is not None,
)

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
    Operator("matrix_exp linalg_matrix_exp", untaped(_evened)),
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
    Operator("logit logit_", refused(
        "with eps has kinks", lambda x, eps=None, **_: eps is not None
    )),
)  # fmt: skip
