"""How arithmetic carries the examples: entry by entry, reduced, or along some dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from seht.engines.persample.axes import SUM, Axis, Broken, Tag
from seht.engines.persample.calls import Call, Follow, couples

# --- entry by entry -------------------------------------------------------------------------------


def elementwise(call: Call) -> Tag | None:
    """One axis for all arguments, aligned from the right as broadcasting does."""
    found: Axis | None = None
    rank = call.out.dim()
    for tensor, tag in zip(call.given, call.tags, strict=True):
        if not isinstance(tag, Axis):
            if tag is not None:
                return tag if isinstance(tag, Broken) else couples(call)
            continue
        aligned = tag.at(tag.dim + rank - tensor.dim())
        if found is not None and found != aligned:
            return couples(call)
        found = aligned
    return found


def additive(call: Call) -> Tag | None:
    """A sum of sums is one; a sum over examples added to an example couples them."""
    if any(tag is SUM for tag in call.tags):
        return SUM if all(tag is SUM or tag is None for tag in call.tags) else couples(call)
    return elementwise(call)


def scaled(call: Call) -> Tag | None:
    """A sum over examples may be multiplied by what all examples share."""
    sums = [place for place, tag in enumerate(call.tags) if tag is SUM]
    if not sums:
        return elementwise(call)
    shared = all(tag is SUM or tag is None for tag in call.tags)
    return SUM if shared and len(sums) == 1 else couples(call)


def divided(call: Call) -> Tag | None:
    """A sum over examples may be divided, but not divide."""
    if len(call.tags) > 1 and call.tags[1] is SUM:
        return couples(call)
    return scaled(call)


# --- reductions -----------------------------------------------------------------------------------


def reduced(call: Call) -> Tag | None:
    """Sum and mean along dimensions; over the examples they give a sum over them."""
    axis, x = call.tags[0], call.given[0]
    if not isinstance(axis, Axis):
        return axis
    dims = call.argument(1, "dim", call.kwargs.get("axis"))
    if isinstance(dims, torch.dtype) or dims is None or dims == ():
        return SUM
    gone = {d % x.dim() for d in ((dims,) if isinstance(dims, int) else tuple(dims))}
    if axis.dim in gone:
        return SUM
    kept = call.out.dim() == x.dim()
    return axis if kept else axis.at(axis.dim - sum(d < axis.dim for d in gone))


def loss(classes: bool, *, at: int) -> Follow:
    """A loss function; ``at`` is the place of the argument ``reduction``."""

    def follow(call: Call) -> Tag | None:
        axis = call.tags[0]
        if not isinstance(axis, Axis):
            return axis if len(call.tags) < 2 or axis is not None else call.tags[1]
        x = call.given[0]
        column = (1 if x.dim() > 1 else 0) if classes else -1
        if axis.dim == column:
            return couples(call)
        if call.argument(at, "reduction", "mean") != "none":
            return SUM
        if classes:
            return axis.at(axis.dim - (axis.dim > column))
        return elementwise(call)

    return follow


# --- along some dimensions of each example --------------------------------------------------------


def within(features: Callable[[Call], set[int]]) -> Follow:
    """Functions that work along some dimensions of each example and leave the others alone."""

    def follow(call: Call) -> Tag | None:
        axis = call.tags[0]
        if not isinstance(axis, Axis):
            return couples(call) if axis is SUM else axis
        return couples(call) if axis.dim in features(call) else axis

    return follow


def along_dim(call: Call) -> set[int]:
    """The argument ``dim``; all of them where none is given."""
    dim = call.argument(1, "dim")
    rank = call.given[0].dim()
    return {dim % rank} if isinstance(dim, int) else set(range(rank))


def trailing(call: Call) -> set[int]:
    """As many of the last dimensions as ``normalized_shape`` has."""
    rank = call.given[0].dim()
    return set(range(rank - len(call.argument(1, "normalized_shape")), rank))


def all_but_first(call: Call) -> set[int]:
    """Channels and whatever comes after them."""
    return set(range(1, call.given[0].dim()))


def spatial(count: int) -> Callable[[Call], set[int]]:
    """The last ``count`` dimensions."""

    def features(call: Call) -> set[int]:
        rank = call.given[0].dim()
        return set(range(max(0, rank - count), rank))

    return features


def batch_normed(call: Call) -> Tag | None:
    """Batch norm; in train mode every example changes the statistics of all."""
    axis = call.tags[0]
    if not isinstance(axis, Axis):
        return axis
    if call.argument(5, "training", False) or call.argument(1, "running_mean") is None:
        return Broken(
            "BatchNorm in train mode makes every example depend on all others (put it in eval "
            "mode, use GroupNorm or LayerNorm, or opt in with coupling='own' or "
            "coupling='frozen', which estimate something else)"
        )
    return couples(call) if axis.dim == 1 else axis
