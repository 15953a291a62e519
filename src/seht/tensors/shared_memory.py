"""Which tensors lie in one memory, and how often it was written into.

Of parameters in one memory a step along one moves the other, too: they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_Known = tuple[tuple[int, ...], list[tuple[int, int]]]
_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
"""Where the parameters of a model lay when last seen, and the places of those that overlap."""


def version(tensor: Tensor) -> int:
    """How often a tensor was written into; inference tensors do not count."""
    return -1 if tensor.is_inference() else tensor._version


def root_of(tensor: Tensor) -> Tensor:
    """The tensor that a view looks at, or the tensor itself."""
    base = None if tensor.is_inference() else tensor._base
    return tensor if base is None else base


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one is a view or an alias of the other."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def refuse_shared(
    model: nn.Module, chosen: dict[str, Tensor], everything: Sequence[tuple[str, Tensor]]
) -> None:
    """Refuse a chosen parameter that overlaps in memory with another one of the model.

    ``a.weight.data = b.weight.data`` makes two parameters of one memory. To autograd they are two;
    moved in place they are one, and nobody can say which of the two traces is wanted. One
    parameter under two names is tied, and right.
    """
    where = tuple(_address(t) for _, t in everything)
    known = _known.get(model)
    if known is None or known[0] != where:  # a few microseconds, unless something has moved
        known = _known[model] = (where, _overlapping(everything, where))
    if known[1]:
        own = {id(tensor) for tensor in chosen.values()}
        for a, b in known[1]:
            if id(everything[a][1]) in own or id(everything[b][1]) in own:
                raise ValueError(_told(everything[a], everything[b]))


def refuse_others(weights: dict[str, Tensor], leaves: Iterable[Tensor]) -> None:
    """The same for drawn weights and leaves of the loss that do not belong to the model."""
    for leaf in leaves:
        for name, weight in weights.items():
            if _address(leaf) and _address(weight) and _near(leaf, weight):
                raise ValueError(
                    f"the parameter {name!r} and another tensor of the loss that requires a "
                    f"gradient, of shape {tuple(leaf.shape)}, are two that lie in one memory; use "
                    "the parameter itself there, or a clone() of it"
                )


def _near(a: Tensor, b: Tensor) -> bool:
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return bool(a.numel() and b.numel()) and _overlap(a, b)


def _address(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none that can be read."""
    if type(tensor) not in _PLAIN:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a sparse one
        return 0


_PLAIN = frozenset({nn.Parameter, Tensor})


def _overlapping(
    everything: Sequence[tuple[str, Tensor]], where: tuple[int, ...]
) -> list[tuple[int, int]]:
    """The places of parameters that share an entry with another."""
    first: dict[int, int] = {}
    for place, (_, tensor) in enumerate(everything):
        if where[place] and tensor.numel():
            first.setdefault(id(tensor), place)
    found: list[tuple[int, int]] = []
    reach: list[int] = []  # those that may still reach into the next
    for place in sorted(first.values(), key=lambda place: where[place]):
        tensor = everything[place][1]
        ends = {k: where[k] + _extent(everything[k][1]) for k in reach}
        reach = [k for k in reach if ends[k] > where[place]]
        for k in reach:
            if _overlap(everything[k][1], tensor):
                found.append((min(k, place), max(k, place)))
        reach.append(place)
    return found


def _extent(tensor: Tensor) -> int:
    """The bytes from its first entry to its last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether an entry of one is an entry of the other; columns of one matrix may lie between."""
    if a.dtype != b.dtype or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return True  # memory that was put together by hand
    first = min(a.storage_offset(), b.storage_offset())
    size = max(t.storage_offset() - first + _extent(t) // t.element_size() for t in (a, b))
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    one, other = (taken.as_strided(t.shape, t.stride(), t.storage_offset() - first) for t in (a, b))
    one.fill_(True)
    return bool(other.any())


def _told(first: tuple[str, Tensor], second: tuple[str, Tensor]) -> str:
    (name, a), (other, b) = first, second
    if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride():
        fix = f"tie them: model.{other} = model.{name}, not model.{other}.data = model.{name}.data"
    else:
        fix = (
            f"give one its own (model.{other}.data = model.{other}.data.clone()), or compute it "
            "from the other in forward"
        )
    return f"the parameters {name!r} and {other!r} are two that lie in one memory; {fix}"
