"""Tensors that lie on several ranks (``DTensor``): this rank's part of them."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


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
