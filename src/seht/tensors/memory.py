"""How tensors lie in memory: in which order, with whom they share it, and on which ranks.

Random numbers are drawn in the order of memory. Where a perturbed pass hands on the same values in
other strides (a max-pooling that was channels-last at the centre, say), a dropout behind it has
another mask, and the difference is nonsense.

Of parameters that share their memory a step along one moves the other, too: they are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

Layout = tuple[int, ...] | list[Any] | None
"""The strides of a tensor, a list of layouts for several; None where nothing is known."""


def layout_of(value: Any) -> Layout:
    """How a result lies in memory; unknown while code is compiled, which has its own layouts."""
    if torch.compiler.is_compiling():
        return None
    if isinstance(value, (tuple, list)):
        return [layout_of(item) for item in value]
    # Other kinds of tensor (sparse, nested, those of torch.vmap) have no strides of their own.
    plain = type(value) is Tensor or type(value) is nn.Parameter
    if not plain or value.layout is not torch.strided or value.is_nested:
        return None
    return None if is_functorch_wrapped_tensor(value) else value.stride()


def laid_out(value: Any, layout: Layout) -> Any:
    """The same values in that layout: usually the tensors themselves."""
    if layout is None:
        return value
    if isinstance(layout, tuple):
        return _moved(value, layout) if isinstance(value, Tensor) else value
    if not isinstance(value, (tuple, list)) or len(value) != len(layout):
        return value
    parts = [laid_out(item, known) for item, known in zip(value, layout, strict=True)]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    return type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts)


def duplicate(tensor: Tensor) -> Tensor:
    """A copy without a graph, in the layout of the original, which ``clone`` may change."""
    copy: Tensor = laid_out(tensor.detach().clone(), layout_of(tensor))
    return copy


def gathered(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x.gather(dim, index)`` in the layout of the index, without another copy."""
    if index.is_contiguous():
        return x.gather(dim, index)
    strides = index.stride()
    order = sorted(range(index.dim()), key=lambda d: strides[d], reverse=True)
    back = [order.index(d) for d in range(index.dim())]
    y = x.permute(order).gather(back[dim % index.dim()], index.permute(order))
    return y.permute(back)


def _moved(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    part = tensor
    if not tensor.requires_grad:  # a constant that was expanded is expanded again
        for dim, stride in enumerate(strides):
            part = part.narrow(dim, 0, 1) if stride == 0 and part.shape[dim] > 1 else part
    if _overlaps(part.shape, strides):
        return tensor
    new = torch.empty_strided(part.shape, strides, dtype=tensor.dtype, device=tensor.device)
    new.copy_(part)
    return new if part is tensor else new.expand(tensor.shape)


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two entries might share their memory."""
    end = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += (size - 1) * stride
    return False


# --- who shares it, and writes into it ------------------------------------------------------------


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


_Known = tuple[tuple[int, ...], list[tuple[int, int]]]
_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
"""Where the parameters of a model lay when last seen, and the places of those that overlap."""


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
                    f"gradient, of shape {tuple(leaf.shape)}, share their memory; use "
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
    return f"the parameters {name!r} and {other!r} share their memory; {fix}"


# --- on ranks: ``DTensor`` ------------------------------------------------------------------------


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this is a part of a tensor that lies on several ranks."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory and without a graph."""
    part: Any = tensor.detach()
    return part.to_local() if is_dtensor(tensor) else part


def own_part(entries: Tensor, tensor: Tensor) -> Tensor:
    """The part of a direction that belongs to this rank's part of ``tensor``.

    Directions are drawn whole, one tensor at a time, and cut: one seed then means the same signs
    however the weights are sharded, and what is drawn is small beside the gathered weight.
    """
    if not is_dtensor(tensor):
        return entries
    for dim, (start, length) in enumerate(place(tensor)):
        entries = entries.narrow(dim, start, length)
    return entries.clone()


def place(tensor: Any) -> list[tuple[int, int]]:
    """Where this rank's part of a ``DTensor`` begins in each dimension, and how long it is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return list(zip(offset, shape, strict=True))
