"""How arithmetic carries the examples: entry by entry, reduced, or along some dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from seht.operators.axes.axes import Axis, Broken, Call, Follow, Sum, Tag, bends, couples, first_of

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


def within(features: Callable[[Call], set[int]]) -> Follow:
    """Functions that work along some dimensions of each example and leave the others alone."""

    def follow(call: Call) -> Tag | None:
        x, axis = call.main()
        others = call.beside(x)
        total = first_of(Sum, [axis, *others])
        if total is not None:
            return bends(call, total)
        if others or (isinstance(axis, Axis) and axis.dim in features(call)):
            return couples(call)  # a scale or a shift that the examples have made
        return axis

    return follow


def along_dim(call: Call) -> set[int]:
    """The argument ``dim``; all of them where none is given."""
    dim = call.argument(1, "dim")
    rank = call.main()[0].dim()
    return {dim % rank} if isinstance(dim, int) else set(range(rank))


def trailing(call: Call) -> set[int]:
    """As many of the last dimensions as ``normalized_shape`` has."""
    rank = call.main()[0].dim()
    return set(range(rank - len(call.argument(1, "normalized_shape")), rank))


def all_but_first(call: Call) -> set[int]:
    """Channels and whatever comes after them."""
    return set(range(1, call.main()[0].dim()))


def spatial(count: int) -> Callable[[Call], set[int]]:
    """The last ``count`` dimensions."""

    def features(call: Call) -> set[int]:
        rank = call.main()[0].dim()
        return set(range(max(0, rank - count), rank))

    return features


def batch_normed(call: Call) -> Tag | None:
    """Batch norm; in train mode every example changes the statistics of all."""
    x, axis = call.main()
    batch = call.argument(5, "training", False) or call.argument(1, "running_mean") is None
    if batch and axis is not None and call.varies(x):
        return Broken(
            "BatchNorm in train mode makes every example depend on all others (put it in eval "
            "mode, use GroupNorm or LayerNorm, or opt in with coupling='own' or "
            "coupling='frozen', which estimate something else)"
        )
    return within(lambda _: {1})(call)
