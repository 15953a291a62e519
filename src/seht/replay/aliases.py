"""Writes into a detached tensor: they also go to what it was taken from."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seht.errors import KinkError
from seht.tensors.shared_memory import root_of, shares_memory

_NO_WRITES = frozenset(
    {torch.Tensor.requires_grad_, torch.Tensor.detach_, torch.Tensor.share_memory_}
)


@dataclass
class Aliases:
    """The detached tensors of a pass, and what they were taken from."""

    _known: dict[int, tuple[weakref.ref[Tensor], ...]] = field(default_factory=dict)

    def note(self, x: Any, out: Any) -> bool:
        """Note that ``out`` was detached from ``x``; returns whether they share their memory."""
        if torch.compiler.is_compiling():  # it has no in-place writes
            return False
        if not isinstance(out, Tensor) or out.requires_grad or isinstance(x, nn.Parameter):
            return False
        if not shares_memory(x, out):
            return False
        self._known[id(out)] = (weakref.ref(out), weakref.ref(x), weakref.ref(root_of(x)))
        return True

    def refuse_write(self, func: Any, target: Tensor) -> None:
        """Raise if what the target was taken from is still there, to be read by the loss."""
        if func in _NO_WRITES:
            return
        for tensor in (target, root_of(target)):
            itself, *sources = self._known.get(id(tensor), (None,))
            if itself is None or itself() is not tensor:
                continue
            if any(source() is not None for source in sources):
                raise KinkError(
                    "an in-place operation on x.detach() or x.data also writes into x, which the "
                    "difference engine cannot freeze; write into x.detach().clone(), or change x "
                    "itself by an out-of-place operation (masked_fill for masked_fill_)"
                )
