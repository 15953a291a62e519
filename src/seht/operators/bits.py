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


def unpack(packed: tuple[Tensor, torch.Size, tuple[int, ...]], dtype: torch.dtype) -> Tensor:
    """The mask again, as numbers 0 and 1 of this type."""
    bits, shape, stride = packed
    eights = _table(str(bits.device), dtype).index_select(0, bits.int())
    return eights.as_strided(shape, stride)


class Masked(torch.autograd.Function):
    """x times the mask, of which autograd keeps the bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Any, in_place: bool) -> Tensor:
        """Keep what is positive at the centre."""
        ctx.packed = packed
        mask = unpack(packed, x.dtype)
        if not in_place:
            return torch.mul(x, mask, out=mask)
        ctx.mark_dirty(x)
        return x.mul_(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Keep the same entries of the gradient."""
        return Masked.apply(grad, ctx.packed, False), None, None


@cache
def _table(device: str, dtype: torch.dtype) -> Tensor:
    # Row b holds the eight entries that the bits of byte b stand for, the first in the highest bit
    # or the lowest: whichever the machine's order of bytes made of them in `pack`.
    bytes_, places = torch.arange(256, device="cpu").unsqueeze(1), torch.arange(8, device="cpu")
    eights = (bytes_ >> places & 1).to(torch.int8)
    table = torch.empty_like(eights)
    table[(eights.view(torch.int64).squeeze(1) * _GATHER >> 56).to(torch.uint8).long()] = eights
    return table.to(device, dtype)
