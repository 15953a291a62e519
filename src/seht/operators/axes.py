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
The rules are a column of the table of operators, with the families (``operators/table.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seht.operators.rules import called


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
        for inner in divisors(size // n):
            if torch.equal(owners, _owners(size, n, inner, None)):
                return Axis(dim, inner)
    return Axis(dim, 1, tuple(owners.tolist()))


def divisors(number: int) -> list[int]:
    """Of a number, in order."""
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
    varying = varying_dims(owners)
    if not varying:  # one example alone
        varying = [d for d, size in enumerate(owners.shape) if size == 1][:1]
        if not varying:
            return Broken("picks out one example")
    if len(varying) > 1:
        return Broken("spreads the examples over several dimensions")
    return axis_from(varying[0], line(owners, varying[0]), n)


def varying_dims(values: Tensor) -> list[int]:
    """The dimensions along which a tensor changes."""
    sizes = enumerate(zip(values.shape, values.stride(), strict=True))
    moving = [d for d, (size, stride) in sizes if size > 1 and stride != 0]
    return [d for d in moving if not bool((values.narrow(d, 0, 1) == values).all())]


def line(values: Tensor, dim: int) -> Tensor:
    """The entries along one dimension, the first in all others."""
    for other in range(values.dim()):
        if other != dim:
            values = values.narrow(other, 0, 1)
    return values.reshape(-1)


def spread(shape: torch.Size, axis: Axis, n: int) -> Tensor:
    """A tensor of this shape that holds the owner of each entry (a view, no memory)."""
    owners = axis.owners(shape[axis.dim], n)
    return along(owners, axis.dim, len(shape)).expand(shape)


def along(vector: Tensor, dim: int, rank: int) -> Tensor:
    """A vector as a tensor of this rank, along one of its dimensions."""
    return vector.view([-1 if d == dim else 1 for d in range(rank)])


_ALSO = {"dim": "axis", "input": "x", "other": "x2"}
"""NumPy's names for arguments, which PyTorch's own functions take as well."""


class Call(NamedTuple):
    """One call that was made, with the tags of its tensors."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    given: list[Tensor]
    tags: list[Tag | None]
    out: Any
    n: int
    hidden: bool = False
    """In the forward of a custom Function, where what varies looks constant."""

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or by name."""
        for known in (name, _ALSO.get(name)):
            if known in self.kwargs:
                return self.kwargs[known]
        return self.args[place] if len(self.args) > place else default

    def main(self) -> tuple[Tensor, Tag | None]:
        """The tensor that the function works on, and its tag."""
        tensor = self.argument(0, "input", self.kwargs.get("self"))
        if not isinstance(tensor, Tensor):
            tensor = self.given[0]
        return tensor, self.tag(tensor)

    def tag(self, value: Any) -> Tag | None:
        """The tag of an argument."""
        for tensor, tag in zip(self.given, self.tags, strict=True):
            if tensor is value:
                return tag
        return None

    def beside(self, *values: Any) -> list[Tag]:
        """The tags of all other tensors that depend on a weight, where they have one."""
        mine = {id(value) for value in values}
        return [
            tag
            for tensor, tag in zip(self.given, self.tags, strict=True)
            if tag is not None and id(tensor) not in mine and self.varies(tensor)
        ]

    def varies(self, tensor: Tensor) -> bool:
        """Whether a tensor may depend on a weight: a constant couples nothing."""
        return self.hidden or tensor.requires_grad

    @property
    def name(self) -> str:
        """What to call the function in a message."""
        return called(self.func)


Follow = Callable[[Call], Tag | None]


def couples(call: Call) -> Broken:
    """The examples meet in this call."""
    return Broken(f"{call.name} mixes examples")


def bends(call: Call, total: Sum) -> Broken:
    """The call is not linear in a sum over the examples."""
    return Broken(f"{total.by} adds examples up before {call.name}, which is not linear in the sum")
