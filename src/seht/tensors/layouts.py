"""How tensors lie: in memory, a replayed result as the centre's did, and on ranks (``DTensor``).

Random numbers are drawn in the order of memory. Where a perturbed pass hands on the same values in
other strides (a max-pooling that was channels-last at the centre, say), a dropout behind it has
another mask, and the difference is nonsense.
"""

from __future__ import annotations

import sys
from typing import Any

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


def like(part: Tensor, tensor: Any) -> Tensor:
    """This rank's part of a gradient as what ``tensor.grad`` has to be."""
    if not is_dtensor(tensor):
        return part
    found: Tensor = type(tensor.detach()).from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return found
