"""Norms of vectors and matrices, and distances. Those of order 1 and infinity are taken by their
definitions, the parts of which have rules of their own.

Orders from 2 on are smooth away from 0, and so are the matrix norms that come from singular
values; what is left, such as p = 1.5, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.operator import Operator, named
from seht.operators.rules import (
    Mode,
    Rule,
    composed,
    depends,
    first,
    opened,
    refuse,
    refused,
    untaped,
)


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


def _smooth(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    """The norm as it is. Where it is 0 it has a kink, too, and to autograd the slope 0."""
    y = func(*args, **kwargs)
    if mode.tracker is not None:
        mode.tracker.follow(func, args, kwargs, y)
    with mode.inside():
        return torch.where(y == 0, 0.0, y)


def norm(kind: str) -> Rule:
    """The rule of a function that takes norms of this ``kind``: vector, matrix or either."""

    def run(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
        x, order, dim, keep = _arguments(args, kwargs)
        if not depends((x,), {}):
            return func(*args, **kwargs)
        if not isinstance(order, (int, float)):  # the default, or the name of a smooth norm
            return _smooth(mode, func, args, kwargs)
        if kind == "matrix" or (kind == "either" and _is_matrix(x, order, dim)):
            if abs(order) == 2:
                return func(*args, **kwargs)
            build = matrix
        elif order in (1, math.inf):
            build = vector
        elif order >= 2:
            return _smooth(mode, func, args, kwargs)
        elif order == 0:
            return func(*args, **kwargs)
        else:
            return refuse(func, "with p below 2 has kinks")
        with mode.inside():
            return build(x, order, dim, keep)

    return untaped(run)


def dist(input: Tensor, other: Tensor, p: float = 2.0) -> Tensor:
    """``torch.dist``."""
    return torch.linalg.vector_norm(input - other, p)


def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """``F.pairwise_distance``."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, dim=-1, keepdim=keepdim)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """The p-norm of each row of x1 less each of x2."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The same between the rows of one matrix, each pair once."""
    a, b = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[a] - input[b], p, dim=-1)


def _order(*args: Any, **kwargs: Any) -> float:
    """The order p of a distance between tensors."""
    p: float = kwargs.get("p", next((a for a in args if not isinstance(a, Tensor)), 2.0))
    return p


def _without_fused(parts: Callable[..., Tensor]) -> Callable[[Any], Callable[..., Tensor]]:
    # No double backward for these orders. That for p = 2 is singular where two rows are the same.
    return lambda native: (
        lambda *args, **kwargs: (parts if _order(*args, **kwargs) in (1, math.inf) else native)(
            *args, **kwargs
        )
    )


def _kinked(*args: Any, **kwargs: Any) -> bool:
    return not 2 <= _order(*args, **kwargs) < math.inf


OPERATORS = (
    Operator(named("norm vector_norm", torch.linalg.norm), norm("vector")),
    Operator((torch.linalg.norm,), norm("either")),
    Operator((torch.linalg.matrix_norm,), norm("matrix")),
    Operator("normalize", opened(F.normalize)),
    Operator("dist", composed(dist)),
    Operator("pairwise_distance", composed(pairwise_distance)),
    Operator("cdist", composed(cdist, _kinked), safe=_without_fused(cdist)),
    Operator("pdist", composed(pdist, _kinked), safe=_without_fused(pdist)),
    Operator("renorm renorm_", refused("has kinks")),
    Operator("cond", refused(
        "with p = 1 or inf has kinks", lambda x, p=None, **_: p in (1, -1, math.inf, -math.inf)
    )),
)  # fmt: skip
