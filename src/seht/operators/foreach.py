"""``torch._foreach_*``: functions of lists of tensors, each by the rule of its single form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from seht.operators.operator import Operator
from seht.operators.rules import composed


def _listed(function: Callable[..., Tensor], *, in_place: bool = False) -> Callable[..., Any]:
    """Of each tensor and what stands beside it, in a list or one number for all: a tuple; or in
    place, the list itself.
    """

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [a.clone() for a in self] if in_place else self  # autograd keeps them
        others = (*args, *kwargs.values())  # their names depend on what they are
        each = [o if isinstance(o, (tuple, list)) else [o] * len(self) for o in others]
        found = tuple(
            function(a, *(_tensor(b, a) for b in rest))
            for a, *rest in zip(given, *each, strict=True)
        )
        if not in_place:
            return found
        for tensor, value in zip(self, found, strict=True):
            tensor.copy_(value)
        return self

    return build


def _tensor(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.scalar_tensor(value, dtype=like.dtype, device=like.device)


def _norm(self: Any, ord: Any = 2, dtype: Any = None) -> tuple[Tensor, ...]:
    return tuple(torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in self)


def _rows() -> Iterator[Operator]:
    yield Operator("_foreach_norm", composed(_norm))
    entries = "abs ceil floor frac round sign trunc clamp_max clamp_min maximum minimum max"
    for name in entries.split():
        function = getattr(torch, name)
        yield Operator(f"_foreach_{name}", composed(_listed(function)))
        if name not in ("maximum", "minimum", "max"):  # which have no derivative in place
            yield Operator(f"_foreach_{name}_", composed(_listed(function, in_place=True)))


OPERATORS = tuple(_rows())
