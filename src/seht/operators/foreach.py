"""``torch._foreach_*``: functions of lists of tensors, each by the rule of its single form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seht.operators.composed import composed
from seht.operators.operator import Operator, named

Lists = Callable[..., Any]


def unary(name: str, *, in_place: bool = False) -> Lists:
    """Function ``name`` of each tensor, as a tuple; or in place, as the list itself."""
    function = getattr(torch.Tensor, f"{name}_" if in_place else name)

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = tuple(function(tensor, *args, **kwargs) for tensor in self)
        return self if in_place else found

    return build


def binary(function: Callable[..., Tensor], *, in_place: bool = False) -> Lists:
    """The same of two: a list beside the first, or one number for all."""

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        (other,) = (*args, *kwargs.values())  # its name depends on what it is
        each = other if isinstance(other, (tuple, list)) else [other] * len(self)
        given = [a.clone() for a in self] if in_place else self  # autograd keeps them
        found = tuple(function(a, _tensor(b, a)) for a, b in zip(given, each, strict=True))
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


def norm(self: Any, ord: Any = 2, dtype: Any = None) -> tuple[Tensor, ...]:
    """The norm of each tensor."""
    return tuple(torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in self)


_ENTRIES = ("abs", "ceil", "floor", "frac", "round", "sign", "trunc")
_PAIRS = ("clamp_max", "clamp_min", "maximum", "minimum")

_FORMS: dict[str, Lists] = {
    **{name: unary(name) for name in (*_ENTRIES, "max")},
    **{f"{name}_": unary(name, in_place=True) for name in _ENTRIES},
    **{name: binary(getattr(torch, name)) for name in _PAIRS},
    # The other two have no derivative in place.
    **{f"{name}_": binary(getattr(torch, name), in_place=True) for name in _PAIRS[:2]},
    "norm": norm,
}

OPERATORS = tuple(
    Operator(named(f"_foreach_{name}"), composed(build)) for name, build in _FORMS.items()
)
