"""Tensors that the recorder tracks by their identity, because autograd does not track them.

A write into a detached tensor also goes to what it was taken from (:class:`Aliases`). And in the
forward of a custom ``autograd.Function`` nothing requires a gradient, so that a decision on an
intermediate result looks like one on a constant: such results are followed by hand, from the inputs
on, which do require one (:class:`Intermediates`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seht.errors import KinkError
from seht.operators.rules import depends
from seht.tensors.memory import root_of, shares_memory
from seht.tensors.trees import tensors

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


@dataclass
class Intermediates:
    """The results inside a custom function that depend on its inputs and are still alive."""

    _known: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)

    def holds(self, args: Any, kwargs: Any) -> bool:
        """Whether one of them is among the arguments."""
        return any(self._is_known(tensor) for tensor in tensors((args, tuple(kwargs.values()))))

    def follow(self, args: Any, kwargs: Any, out: Any) -> Any:
        """Remember what an operation made of its arguments, where those depend on the inputs."""
        if depends(args, kwargs) or self.holds(args, kwargs):
            for tensor in tensors(out):
                self._known[id(tensor)] = weakref.ref(tensor)
        return out

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor
