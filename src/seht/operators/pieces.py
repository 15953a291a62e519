"""Rules for functions made of pieces: the piece of the centre goes on, smooth or straight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seht.errors import KinkError
from seht.operators.bits import Masked, pack
from seht.operators.rules import Mode, Rule, called, first, write_back
from seht.tensors.graph_need import kept_graph
from seht.tensors.memory import laid_out, layout_of

# --- relu: the one that must be as fast as the operation itself ---------------------------------

_OUTPUT, _MASK, _BITS, _TRACED = range(4)
"""What is kept of it: its output, which the graph holds anyway, or which entries are positive."""


def _relu_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    x = first(args, kwargs)
    y = func(*args, **kwargs)
    if torch.compiler.is_compiling():
        return y, (y is x, _TRACED, _laid_out((y.detach() > 0).to(y.dtype)), None)
    if y is x or mode.compact:
        mask = y.detach() > 0
        bits = pack(mask) if mode.compact else None
        if bits is not None:
            return y, (y is x, _BITS, bits, None)
        return y, (y is x, _MASK, mask.view(torch.int8), None)
    return y, (False, _OUTPUT, y.detach(), y._version)


def _is_image(kept: Tensor) -> bool:
    return kept.dim() == 4 and kept.device.type == "cpu"


def _laid_out(kept: Tensor) -> Tensor:
    """What leaves compiled code keeps the layout of uncompiled code, but the compiler computes
    images on a CPU with the channels last: so they leave with the channels last, too, and as
    numbers, as bytes are read one by one there. Else a compiled replay takes thrice as long.
    """
    return kept.permute(0, 2, 3, 1).contiguous() if _is_image(kept) else kept


def _relu_replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    x, (in_place, form, kept, version) = first(args, kwargs), decision
    if form == _TRACED:
        kept = kept.permute(0, 3, 1, 2) if _is_image(kept) else kept
        return x.mul_(kept) if in_place else x * kept
    if form == _BITS:
        return Masked.apply(x, kept, in_place)
    if form == _MASK:
        return x.mul_(kept) if in_place else x * kept
    if kept._version != version:
        raise KinkError(
            "the output of relu was overwritten in place after it was computed, which autograd "
            "refuses too; use an out-of-place operation there"
        )
    # x where the centre's output is positive, else 0: a fused form of x * mask.
    return torch.ops.aten.threshold_backward(x, kept, 0)


RELU = Rule(_relu_record, _relu_replay)


# --- the modulus of complex numbers ---------------------------------------------------------------
# At 0 it has no derivative. PyTorch takes 0 for the first, and NaN for the third, which would reach
# the weights from every frame of silence in a spectrogram. Here all of them are 0.

MODULI = frozenset((torch.abs, Tensor.abs, Tensor.__abs__, torch.absolute, Tensor.absolute))
"""The functions that give it."""


def modulus(c: Tensor, zero: Tensor) -> Tensor:
    """|c|, and the constant 0 where ``zero`` says that it is 0."""
    return c.masked_fill(zero, 1).abs().masked_fill(zero, 0)


# --- piecewise linear functions: f(x) = sum_i a_i x_i + b on the piece of the centre -------------


def real_arguments(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The real-valued tensors among the arguments, each by its place or name."""
    items = (*enumerate(args), *kwargs.items())
    return [(k, v) for k, v in items if isinstance(v, Tensor) and v.is_floating_point()]


def with_slopes(
    function: Callable[..., Tensor], points: list[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """The function there, and the gradient of its sum."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        # Inside torch.vmap or torch.func.grad, where a tensor cannot be told to require one.
        y, pull = torch.func.vjp(function, *points)[:2]
        return y, pull(torch.ones_like(y))
    leaves = [point.requires_grad_() for point in points]
    with kept_graph():
        y = function(*leaves)
        slopes = torch.autograd.grad(y, leaves, torch.ones_like(y), materialize_grads=True)
    for leaf in leaves:
        leaf.requires_grad_(False)
    return y.detach(), slopes


def _refuse_mixing(
    func: Any, function: Callable[..., Tensor], points: list[Tensor], slopes: Sequence[Tensor]
) -> None:
    """An operation registered as linear whose entries depend on other entries would be silently
    wrong: with other cotangents than ones its gradient is not these times the slopes.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    leaves = [point.detach().requires_grad_() for point in points]
    with kept_graph():
        y = function(*leaves)
        others = 1 + torch.arange(y.numel(), device=y.device).mul(7919).remainder(13).to(y) / 7
        others = others.view(y.shape)
        found = torch.autograd.grad(y, leaves, others, materialize_grads=True)
    for leaf, slope, own in zip(leaves, slopes, found, strict=True):
        if y.shape != leaf.shape or not torch.allclose(own, others * slope, 1e-3, equal_nan=True):
            raise KinkError(
                f"{called(func)} is registered as 'linear', but an entry of its "
                "result depends on other entries of its argument; register a pair (record, "
                "replay), or the part of it that works entry by entry"
            )


def _linear_record(
    mode: Mode, func: Any, args: Any, kwargs: Any, *, users: bool = False
) -> tuple[Any, Any]:
    slots = real_arguments(args, kwargs)
    if not slots:  # the modulus or the sign of complex numbers is smooth, but for 0
        c = first(args, kwargs)
        if func not in MODULI or "out" in kwargs or not isinstance(c, Tensor):
            return func(*args, **kwargs), None
        zero = c.detach() == 0
        return modulus(c, zero), zero
    shape = torch.broadcast_shapes(*(v.shape for _, v in slots))
    places = [k for k, _ in slots]
    points = [v.detach().expand(shape).clone() for _, v in slots]

    def call(*values: Tensor) -> Tensor:
        # The clones keep an in-place operation from writing into the values.
        new = {k: v.clone() for k, v in zip(places, values, strict=True)}
        y: Tensor = func(
            *[new.get(i, a) for i, a in enumerate(args)],
            **{k: new.get(k, v) for k, v in kwargs.items()},
        )
        return y

    with mode.random.kept():
        y, slopes = with_slopes(call, points)
        if users:
            _refuse_mixing(func, call, points, slopes)
    rest = y
    for slope, point in zip(slopes, points, strict=True):
        rest = rest - (slope * point).masked_fill(slope == 0, 0)
    rest = rest.masked_fill_(rest.isnan(), 0)  # where an infinite input passes through
    out = func(*args, **kwargs)
    rest = laid_out(rest, layout_of(out))
    return out, (out is first(args, kwargs), slopes, rest, mode.state_after(func))


def _linear_replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if decision is None:
        return func(*args, **kwargs)
    if isinstance(decision, Tensor):
        return modulus(first(args, kwargs), decision)
    in_place, slopes, rest, state = decision
    y = rest
    for slope, (_, x) in zip(slopes, real_arguments(args, kwargs), strict=True):
        # An infinite input on a flat piece must not become 0 * inf.
        y = y + (slope * x).masked_fill(slope == 0, 0)
    mode.jump_to(state)
    return write_back(first(args, kwargs), y, in_place)


LINEAR = Rule(_linear_record, _linear_replay)
USERS_LINEAR = Rule(partial(_linear_record, users=True), _linear_replay)
"""The same of an operation of somebody's own, who may be wrong about it."""


# --- a smooth formula on each side ----------------------------------------------------------------


def sided(
    formula: Callable[..., Tensor], sides: Callable[..., Any] = lambda x, *_, **__: x > 0
) -> Rule:
    """``formula(sides, x, ...)`` with the recorded sides: ``sides(x, ...)``, or x > 0."""

    def options(args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return args[1:], {k: v for k, v in kwargs.items() if k not in ("inplace", "input", "self")}

    def record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x, (rest, named) = first(args, kwargs), options(args, kwargs)
        found = sides(x.detach(), *rest, **named)
        out = func(*args, **kwargs)
        return out, (out is x, found)

    def replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        in_place, found = decision
        x, (rest, named) = first(args, kwargs), options(args, kwargs)
        return write_back(x, formula(found, x, *rest, **named), in_place)

    return Rule(record, replay)
