"""Rules for functions that pick entries: the place of each maximum is that of the centre."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seht.operators.pieces import LINEAR, real_arguments, with_slopes
from seht.operators.rules import Rule, first
from seht.tensors.layouts import gathered


def indexed(dim_at: int, *, default: int | None = -1) -> Rule:
    """Operations that return ``(values, indices)`` along a dimension (the argument ``dim_at``)."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):  # max(x) or max(x, y)
            rule = LINEAR if len(real_arguments(args, kwargs)) > 1 else REDUCED
            out, decision = rule.record(mode, func, args, kwargs)
            return out, (rule, decision)
        return out, (None, out[1])

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
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


def _reduced_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    point = first(args, kwargs).detach().clone()
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "self")}
    # Each entry belongs to one output, and ties are shared as autograd shares them.
    _, (slope,) = with_slopes(lambda x: func(x, *args[1:], **rest), [point])
    return func(*args, **kwargs), slope


def _reduced_replay(mode: Any, slope: Any, func: Any, args: Any, kwargs: Any) -> Any:
    x = first(args, kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else ())
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    product = (slope * x).masked_fill(slope == 0, 0)  # an infinite loser: 0 * inf
    return product.sum(dim, keepdim=keep) if dim != () else product.sum()


REDUCED = Rule(_reduced_record, _reduced_replay)


def pooled(with_indices: Any, spatial: int, *, options: int, pair: bool = False) -> Rule:
    """Max-pooling over ``spatial`` axes; ``options`` positional arguments before return_indices."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        named = {k: v for k, v in kwargs.items() if k != "return_indices"}
        out, index = with_indices(*args[:options], **named)
        return ((out, index) if pair else out), (index, mode.state_after(func))

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        index, state = decision
        flat = gathered(first(args, kwargs).flatten(-spatial), -1, index.flatten(-spatial))
        out = flat.view(index.shape)
        mode.jump_to(state)
        return (out, index) if pair else out

    return Rule(record, replay)
