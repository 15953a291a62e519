"""Norms of order 1 and infinity by their definitions, the parts of which have rules of their own.

Orders from 2 on are smooth away from 0, and so are the matrix norms that come from singular
values; what is left, such as p = 1.5, is refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seht.operators.composed import refused
from seht.operators.rules import Rule, depends, first

_REFUSED = refused("with p below 2 has kinks")


def _arguments(args: Any, kwargs: Any) -> tuple[Tensor, Any, Any, bool]:
    """The tensor, the order, the dimensions and whether to keep them."""
    x = first(args, kwargs)
    x = kwargs.get("x", kwargs.get("A")) if x is None else x
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    keep = kwargs.get("keepdim", args[3] if len(args) > 3 else False)
    wide = kwargs.get("dtype")
    return x if wide is None else x.to(wide), order, dim, keep


def vector(x: Tensor, order: Any, dim: Any, keep: bool) -> Tensor:
    """The sum or the largest of the moduli."""
    dim = tuple(range(x.dim())) if dim is None else dim
    size = x.abs()
    return size.sum(dim, keepdim=keep) if order == 1 else size.amax(dim, keepdim=keep)


def matrix(x: Tensor, order: Any, dim: Any, keep: bool) -> Tensor:
    """The largest (or, of negative order, the smallest) column or row sum of the moduli."""
    rows, columns = (-2, -1) if dim is None else dim
    over, along = (rows, columns) if abs(order) == 1 else (columns, rows)
    sums = x.abs().sum(over, keepdim=True)
    y = sums.amax(along, keepdim=True) if order > 0 else sums.amin(along, keepdim=True)
    return y if keep else y.squeeze((rows, columns))


def _is_matrix(x: Tensor, order: Any, dim: Any) -> bool:
    """As ``torch.linalg.norm`` tells them apart."""
    if dim is None:
        return order is not None and x.dim() == 2
    return isinstance(dim, (tuple, list)) and len(dim) == 2 and order is not None


def _smooth(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The norm as it is. Where it is 0 it has a kink, too, and to autograd the slope 0."""
    y = func(*args, **kwargs)
    if mode.tracker is not None:
        mode.tracker.follow(func, args, kwargs, y)
    with mode.inside():
        return torch.where(y == 0, 0.0, y), None


def norm(kind: str) -> Rule:
    """The rule of a function that takes norms of this ``kind``: vector, matrix or either."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x, order, dim, keep = _arguments(args, kwargs)
        if not depends((x,), {}):
            return func(*args, **kwargs), None
        if not isinstance(order, (int, float)):  # the default, or the name of a smooth norm
            return _smooth(mode, func, args, kwargs)
        if kind == "matrix" or (kind == "either" and _is_matrix(x, order, dim)):
            if abs(order) == 2:
                return func(*args, **kwargs), None
            build = matrix
        elif order in (1, math.inf):
            build = vector
        else:
            if order >= 2:
                return _smooth(mode, func, args, kwargs)
            if order == 0:
                return func(*args, **kwargs), None
            return _REFUSED.record(mode, func, args, kwargs)
        with mode.inside():
            return build(x, order, dim, keep), None

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return record(mode, func, args, kwargs)[0]

    return Rule(record, replay, taped=False)


def dist(input: Tensor, other: Tensor, p: float = 2.0) -> Tensor:
    """``torch.dist``."""
    return torch.linalg.vector_norm(input - other, p)


def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """``F.pairwise_distance``."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, dim=-1, keepdim=keepdim)
