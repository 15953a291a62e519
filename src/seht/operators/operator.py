"""One row for each operator: everything that we know of it, whatever it is called by.

``F.relu``, ``torch.relu`` and ``Tensor.relu`` reach a function mode as different objects, and a
look-up must not do string work (``torch.compile`` traces it). So a row holds the function objects,
found by name once, when the package is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import GetSetDescriptorType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from seht.operators.axes import Follow
from seht.operators.rules import Rule

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


@dataclass(frozen=True)
class Operator:
    """A row of the table; a column that is left out means the harmless case."""

    of: str | tuple[Any, ...]
    """Their names, for every function object behind them; or the objects themselves."""
    kink: Rule | None = None
    """How decisions are frozen. None: it is twice smooth, and autograd holds nothing constant."""
    axes: Follow | None = None
    """Where the examples of a batch go. None: asked by experiment."""
    affine: Affinity | None = None
    """In which of its arguments it is affine. None: in none, or unknown."""
    safe: Callable[[Any], Callable[..., Any]] | None = None
    """Makes a replacement that is right at every order of derivative. None: none is needed."""
    sharp: Rule | None = None
    """How it is computed in float64. None: it is not."""
    random: bool = False
    """Whether it draws random numbers that a replay does not draw again."""
    moves: bool = False
    """Whether it puts entries elsewhere and changes none."""
    adds: bool = False
    """Whether a sum over examples stays one, although it does more than to move entries."""
    by_content: bool = False
    """Whether where it puts them depends on what an index or a mask holds."""

    @cached_property
    def functions(self) -> tuple[Any, ...]:
        """The function objects."""
        return named(self.of) if isinstance(self.of, str) else self.of


def named(names: str, *but: Any) -> tuple[Any, ...]:
    """Every function object behind these names, in F, torch, torch._C._nn, Tensor and aten; but."""
    homes = (F, torch, torch._C._nn, torch.Tensor, torch.special, torch.linalg)
    words = names.split()
    found = [getattr(home, n) for n in words for home in homes if callable(getattr(home, n, None))]
    for packet in (getattr(torch.ops.aten, n, None) for n in words if not n.startswith("__")):
        # What an exported model is made of.
        if packet is not None:
            found += [packet, *(getattr(packet, overload) for overload in packet.overloads())]
    return tuple(f for f in dict.fromkeys(found) if f not in but)


def _argument_names(function: Any) -> tuple[str, ...]:
    """The names of a function's arguments, in order."""
    if inspect.isfunction(function):
        return tuple(inspect.signature(function).parameters)
    schema = getattr(function, "_schema", None)
    if schema is None:  # one of torch's, or an operator of aten with several forms
        packet = getattr(torch.ops.aten, function.__name__)
        schema = getattr(packet, packet.overloads()[0])._schema
    own = {"epsilon": "eps"}  # cuDNN's word
    return tuple(own.get(a.name, a.name) for a in schema.arguments)


def by_name(function: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Gives the arguments of a call of the function by their names; ask when importing."""
    names = _argument_names(function)
    return lambda args, kwargs: dict(zip(names, args, strict=False)) | kwargs


_OPERATORS = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__
    __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__
    """.split()  # noqa: SIM905
)

IN_PLACE = frozenset(
    getattr(home, n)
    for home in (torch, torch.Tensor)
    for n in dir(home)
    if (n.endswith("_") and not n.endswith("__")) or n in _OPERATORS
    if callable(getattr(home, n))
)
"""Functions that write into their first argument."""

_TENSORS = {"data", "grad", "_grad", "_base", "T", "mT", "H", "mH", "real", "imag"}
METADATA = frozenset(
    {
        attribute.__get__
        for name, attribute in vars(torch._C.TensorBase).items()
        if isinstance(attribute, GetSetDescriptorType) and name not in _TENSORS
    }
    | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride}
    | {torch.Tensor.is_floating_point, torch.is_floating_point}
)
"""``dtype``, ``shape`` and the like: they compute nothing, and a closure may look them up once."""
