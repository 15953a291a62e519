"""Masks in bits: a byte for eight decisions, also while a perturbed pass waits for its backward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_FEWEST = 1 << 16
"""Below that many decisions the calls cost more than the memory is worth."""
_GATHER = 0x0102040810204080
"""Eight bytes of 0 or 1, taken as one number and multiplied by this, end up in its highest byte."""


def pack(mask: Tensor) -> tuple[Tensor, torch.Size, tuple[int, ...]] | None:
    """The entries of a fresh boolean tensor in the order of its memory, or None if not worth it."""
    count = mask.numel()
    if count < _FEWEST or count % 8 or torch.compiler.is_compiling():
        return None
    if type(mask) is not Tensor or torch._C._are_functorch_transforms_active():
        return None
    if mask.untyped_storage().nbytes() != count:
        return None
    eights = mask.as_strided((count,), (1,)).view(torch.int64)
    return (eights * _GATHER >> 56).to(torch.uint8), mask.shape, mask.stride()


def unpack(packed: tuple[Tensor, torch.Size, tuple[int, ...]]) -> Tensor:
    """The mask again, as numbers 0 and 1."""
    bits, shape, stride = packed
    eights = _table(str(bits.device)).index_select(0, bits.int())
    return eights.view(torch.int8).as_strided(shape, stride)


def masked(x: Tensor, packed: Any, *, in_place: bool) -> Tensor:
    """x times the mask, of which autograd keeps the bits."""
    mask = unpack(packed)

    def keep(tensor: Tensor) -> Any:
        return packed if tensor.dtype is torch.int8 else tensor

    def give(kept: Any) -> Tensor:
        return unpack(kept) if isinstance(kept, tuple) else kept

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        return x.mul_(mask) if in_place else x * mask


@cache
def _table(device: str) -> Tensor:
    # Row b holds the eight entries that the bits of byte b stand for, the first in the highest bit
    # or the lowest: whichever the machine's order of bytes made of them above.
    bytes_, places = torch.arange(256, device="cpu").unsqueeze(1), torch.arange(8, device="cpu")
    eights = (bytes_ >> places & 1).to(torch.int8).view(torch.int64).squeeze(1)
    table = torch.empty_like(eights)
    table[(eights * _GATHER >> 56).to(torch.uint8).long()] = eights
    return table.to(device)
