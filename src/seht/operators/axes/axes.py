"""Where the examples of a batch lie in every tensor of a closure.

Per-sample probes need to know which entries of a tensor belong to which example. The model's
inputs say where the examples begin; from there a tag goes from call to call:

- an :class:`Axis`: index k along ``dim`` belongs to example ``(k // inner) % n``, so that
  ``(time, batch)``, ``(time * batch, width)`` and ``(batch * windows, width)`` all have one;
- a :class:`Sum`: each entry is a sum of terms that have one example each, as a loss is. It stays
  one under linear operations; in any other the terms meet;
- a :class:`Broken` axis, with the reason: an error where it meets a probed weight or the loss;
- no tag: the same for all examples (weights, constants, positions).

Each is a weaker statement than the one before: what has no tag has any axis, and what has an axis
is a sum of one term. A rule may answer with a weaker one, and never with a stronger one.

What is constant to autograd cannot couple the examples, whatever was computed before.
The rules are in ``axis_table.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """The examples lie along ``dim``; ``owner`` lists them one by one where there is no order."""

    dim: int
    inner: int = 1
    owner: tuple[int, ...] | None = None

    def at(self, dim: int) -> Axis:
        """The same along another dimension."""
        return Axis(dim, self.inner, self.owner)

    def owners(self, size: int, n: int) -> Tensor:
        """The example of each index along ``dim``."""
        return _owners(size, n, self.inner, self.owner)


@lru_cache(maxsize=4096)
def _owners(size: int, n: int, inner: int, owner: tuple[int, ...] | None) -> Tensor:
    if owner is not None:
        return torch.tensor(owner, dtype=torch.long, device="cpu")
    return torch.arange(size, device="cpu") // inner % n


def axis_from(dim: int, owners: Tensor, n: int) -> Axis:
    """The axis along ``dim`` with these owners, in the short form where there is one."""
    size = len(owners)
    if size and size % n == 0:
        for inner in _divisors(size // n):
            if torch.equal(owners, _owners(size, n, inner, None)):
                return Axis(dim, inner)
    return Axis(dim, 1, tuple(owners.tolist()))


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


@dataclass(frozen=True)
class Sum:
    """Each entry is a sum of terms that have one example each; ``by`` is who added them up."""

    by: str


@dataclass(frozen=True)
class Broken:
    """No axis any more, and why."""

    reason: str


Tag = Axis | Sum | Broken


def first_of(kind: Any, tags: Any) -> Any:
    """The first tag of that kind, or None."""
    return next((tag for tag in tags if isinstance(tag, kind)), None)


def compressed(owners: Tensor, n: int) -> Axis | Broken:
    """The axis of a tensor that holds the owner of each entry."""
    varying = []
    for dim, (size, stride) in enumerate(zip(owners.shape, owners.stride(), strict=True)):
        if size > 1 and stride != 0 and not bool((owners.narrow(dim, 0, 1) == owners).all()):
            varying.append(dim)
    if not varying:  # one example alone
        fit = [d for d, size in enumerate(owners.shape) if size == 1]
        if not fit:
            return Broken("picks out one example")
        varying = fit[:1]
    if len(varying) > 1:
        return Broken("spreads the examples over several dimensions")
    line = owners
    for dim in range(owners.dim()):
        if dim != varying[0]:
            line = line.narrow(dim, 0, 1)
    return axis_from(varying[0], line.reshape(-1), n)


def spread(shape: torch.Size, axis: Axis, n: int) -> Tensor:
    """A tensor of this shape that holds the owner of each entry (a view, no memory)."""
    ones = [1] * len(shape)
    ones[axis.dim] = shape[axis.dim]
    return axis.owners(shape[axis.dim], n).view(ones).expand(shape)
