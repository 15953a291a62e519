"""Functions that pick entries, pooling among them: the place of each maximum is the centre's."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.arithmetic import within
from seht.operators.operator import Operator, jointly, named
from seht.operators.pieces import LINEAR, real_arguments, with_slopes
from seht.operators.rules import Mode, Recording, Rule, first, opened, refused
from seht.tensors.memory import gathered


def indexed(dim_at: int, *, default: int | None = -1) -> Rule:
    """Operations that return ``(values, indices)`` along a dimension (the argument ``dim_at``)."""

    def record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):  # max(x) or max(x, y)
            rule = LINEAR if len(real_arguments(args, kwargs)) > 1 else REDUCED
            out, decision = rule.record(mode, func, args, kwargs)
            return out, (rule, decision)
        return out, (None, out[1])

    def replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        rule, index = decision
        if rule is not None:
            return rule.replay(mode, index, func, args, kwargs)
        dim = kwargs.get("dim", args[dim_at] if len(args) > dim_at else default)
        x = first(args, kwargs)
        if x.dim() == 0:
            return type_of(func)((x.clone(), index))
        flat = index.dim() < x.dim()
        values = gathered(x, dim, index.unsqueeze(dim) if flat else index)
        return type_of(func)((values.squeeze(dim) if flat else values, index))

    def type_of(func: Any) -> Callable[[Any], Any]:
        return getattr(torch.return_types, func.__name__, tuple)

    return Rule(record, replay)


def _reduced_record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    point = first(args, kwargs).detach().clone()
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "self")}
    # Each entry belongs to one output, and ties are shared as autograd shares them.
    _, (slope,) = with_slopes(lambda x: func(x, *args[1:], **rest), [point])
    return func(*args, **kwargs), slope


def _reduced_replay(mode: Mode, slope: Any, func: Any, args: Any, kwargs: Any) -> Any:
    x = first(args, kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else ())
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    product = (slope * x).masked_fill(slope == 0, 0)  # an infinite loser: 0 * inf
    return product.sum(dim, keepdim=keep) if dim != () else product.sum()


REDUCED = Rule(_reduced_record, _reduced_replay)


def pooled(with_indices: Any, spatial: int, *, options: int, pair: bool = False) -> Rule:
    """Max-pooling over ``spatial`` axes; ``options`` positional arguments before return_indices."""

    def record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        named = {k: v for k, v in kwargs.items() if k != "return_indices"}
        out, index = with_indices(*args[:options], **named)
        return ((out, index) if pair else out), (index, mode.state_after(func))

    def replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        index, state = decision
        flat = gathered(first(args, kwargs).flatten(-spatial), -1, index.flatten(-spatial))
        out = flat.view(index.shape)
        mode.jump_to(state)
        return (out, index) if pair else out

    return Rule(record, replay)


def _pools(n: int) -> Iterator[Operator]:
    """Pooling over ``n`` axes."""
    alone = within(lambda _, rank: range(max(0, rank - n), rank))
    averages = named(f"avg_pool{n}d adaptive_avg_pool{n}d")
    yield Operator(averages, axes=alone, affine=jointly)
    yield Operator(named(f"lp_pool{n}d"), opened(getattr(F, f"lp_pool{n}d")), alone)
    for kind, options in (("max_pool", 6), ("adaptive_max_pool", 2), ("fractional_max_pool", 4)):
        with_indices = getattr(F, f"{kind}{n}d_with_indices", None)
        if with_indices is None:
            continue
        one = pooled(with_indices, n, options=options)
        two = pooled(with_indices, n, options=options, pair=True)
        random = kind == "fractional_max_pool"
        axes, affine = (None, None) if random else (alone, jointly)
        functions = named(f"{kind}{n}d")
        # Of the fused operators only max_pool has a form without the indices.
        single = [isinstance(f, types.FunctionType) or kind == "max_pool" for f in functions]
        for kink, wanted in ((one, True), (two, False)):
            found = [f for f, has in zip(functions, single, strict=True) if has is wanted]
            yield Operator(tuple(found), kink, axes, affine, random=random)
        yield Operator(named(f"{kind}{n}d_with_indices"), two, random=random)


OPERATORS = (
    Operator("max min median nanmedian", indexed(1, default=None)),
    Operator("sort mode cummax cummin", indexed(1)),
    Operator("topk kthvalue", indexed(2)),
    Operator("amax amin", REDUCED),
    *(pool for n in (1, 2, 3) for pool in _pools(n)),
    Operator("aminmax msort quantile nanquantile", refused("has kinks")),
)  # fmt: skip
