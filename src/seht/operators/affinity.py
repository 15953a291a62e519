"""In which probed tensors the result of a call is affine, from those of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Depends: TypeAlias = frozenset[int] | None
"""The identities of the tensors it is affine in, of all it depends on; None where it is not."""
Affinity: TypeAlias = Callable[[list[frozenset[int]], Any, dict[str, Any]], Depends]

NOTHING: frozenset[int] = frozenset()


def jointly(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Affine in all its arguments together, as a sum is."""
    return NOTHING.union(*given)


def each(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Affine in each argument alone, as a product is: a tensor in two of them would be squared."""
    together = NOTHING.union(*given)
    return together if len(together) == sum(map(len, given)) else None


def first_alone(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Affine in the first argument alone, as a quotient is, unless it is rounded."""
    rounded = kwargs.get("rounding_mode") is not None
    return None if rounded or any(given[1:]) else given[0]


def stored_statistics(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Batch norm: with stored statistics a scale and a shift."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    stored = bound.get("running_mean") is not None and not bound.get("training", False)
    return each(given, args, kwargs) if stored else None


def rows(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Embedding: picks rows, unless it shortens them first."""
    names = ("input", "weight", "padding_idx", "max_norm")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    return jointly(given, args, kwargs) if bound.get("max_norm") is None else None
