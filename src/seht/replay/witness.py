"""Whether a closure repeats itself: the sequence of its operations and what they read.

A hidden state carried in an outer variable, another batch drawn inside, random numbers from
elsewhere: each shows as another operation, another number or another outside tensor. What matters
is what reaches the loss: a tensor made from something else than before is an error only where it
meets the graph, so that a running mean for the log may go on. Looking costs some 40 microseconds
per operation, so it is done on the first steps and now and then; the cheap guards of
:mod:`seht.replay.replayer` watch the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload

from seht.errors import UnrepeatableError
from seht.operators.operator import IN_PLACE
from seht.operators.rules import called, depends
from seht.operators.table import RANDOM
from seht.tensors.memory import layout_of, root_of, version
from seht.tensors.trees import tensors

_FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_SAMPLE = 64


def unrepeatable(what: str) -> UnrepeatableError:
    """The error, with what to do about it."""
    return UnrepeatableError(
        f"the closure cannot be repeated: {what}. It runs several times in a penalised step and "
        "must compute the same loss each time: draw the batch and read hidden states before it, "
        "return new states as aux, and draw from the global generators of torch, Python or NumPy"
    )


@dataclass
class _Outside:
    """A tensor that the closure reads and did not make."""

    tensor: Tensor  # kept alive, so that its identity means something
    version: int | None
    """None where the closure itself has written into it: then its content must be the same."""
    bits: Tensor | None
    """Some entries: a write through ``.data`` or NumPy leaves no other trace."""

    def same_as(self, other: object) -> bool:
        if not isinstance(other, _Outside) or (self.version is None) != (other.version is None):
            return False
        if is_functorch_wrapped_tensor(self.tensor):
            return is_functorch_wrapped_tensor(other.tensor)  # made anew by each vmap or grad
        if self.tensor is not other.tensor and self.version is not None:
            # Made anew in each run (from_numpy, say): the same as long as it holds the same.
            return _equal(_bits(self.tensor), _bits(other.tensor))
        return self.version == other.version and _equal(self.bits, other.bits)


class Witness:
    """Notes what a pass does; a second one compares a later pass with it."""

    def __init__(
        self, since: int, exempt: Sequence[Container[int]], before: Witness | None = None
    ) -> None:
        self._since = since
        self._exempt = exempt
        self._before = before
        self._inside: dict[int, weakref.ref[Tensor]] = {}
        self._written: dict[int, Tensor] = {}
        self._changed: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        """What is not as it was before, and why."""
        self._calls: list[tuple[Any, list[Any]]] = []
        self._reason: str | None = None
        self.blind: bool = before is not None and before.blind and not before._calls

    def see(
        self, func: Any, args: Any, kwargs: dict[str, Any], *, frozen: bool, lenient: bool
    ) -> None:
        """Before a call: what it is given.

        ``frozen`` calls return what they did before; a ``lenient`` pass may leave something out,
        after which the sequences cannot be compared any more.
        """
        self._reason = None
        if isinstance(func, OpOverload):
            self.lose_sight()
        if self.blind:
            return
        target = args[0] if func in IN_PLACE and args and isinstance(args[0], Tensor) else None
        found: list[Any] = []
        if not frozen:
            self._describe((args, kwargs), target, found)
            if func in RANDOM and not depends(args, kwargs):  # drawn again, in memory's order
                found.append(layout_of((*args, *kwargs.values())))
        self._calls.append((func, found))
        if lenient and not self._follows(func):
            self.blind = True
            return
        given = list(tensors((args, tuple(kwargs.values()))))
        if self._before is not None:
            self._reason = self._compare(len(self._calls) - 1, func, found)
            if not frozen:
                self._reason = next(filter(None, map(self._why, given)), self._reason)
        if frozen:
            self._reason = None
        elif self._reason is not None and any(t.requires_grad for t in given):
            raise unrepeatable(self._reason)
        elif target is not None:
            self._write(root_of(target))

    def lose_sight(self) -> None:
        """Compiled code follows, whose inside differs between the passes."""
        if not self.blind and self._changed:  # it may read what has changed
            raise unrepeatable(next(iter(self._changed.values()))[1])
        self.blind = True

    def made(self, func: Any, args: Any, out: Any) -> None:
        """After a call: its results are the closure's own."""
        if self._reason is not None and func in IN_PLACE:
            out = (out, args[0], root_of(args[0]))
        for tensor in tensors(out):
            if self._reason is not None:
                self._changed[id(tensor)] = (weakref.ref(tensor), self._reason)
            # What is made from numbers is compared where it is used, as an outside tensor.
            if func not in _FROM_NUMBERS and id(tensor) not in self._written:
                self._inside[id(tensor)] = weakref.ref(tensor)

    def finish(self, *, lenient: bool) -> None:
        """Nothing may be missing at the end."""
        if self._before is None or self.blind or self._before.blind or lenient:
            return
        if len(self._calls) < len(self._before._calls):
            func = self._before._calls[len(self._calls)][0]
            raise unrepeatable(f"it never came to {called(func)} again")

    def _describe(self, value: Any, target: Any, found: list[Any]) -> None:
        if isinstance(value, Tensor):
            found.append(("shape", tuple(value.shape), value.dtype))
            if value is not target and not self._own(value):
                found.append(self._outside(value))
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._describe(item, target, found)
        elif isinstance(value, dict):
            for key, item in value.items():
                found.append(key)
                self._describe(item, target, found)
        elif isinstance(value, slice):
            self._describe((value.start, value.stop, value.step), target, found)
        elif isinstance(value, (int, float, complex, str, type(None), torch.dtype, torch.device)):
            found.append(repr(value))
        elif hasattr(value, "tobytes"):  # NumPy's arrays and numbers
            found.append((type(value), getattr(value, "shape", None), value.tobytes()))
        else:
            found.append(type(value))

    def _outside(self, value: Tensor) -> _Outside:
        if id(value) in self._written:
            return _Outside(value, None, _bits(value))
        still = value.device.type == "cpu" and not value.requires_grad  # weights move
        still = still and not is_functorch_wrapped_tensor(value)  # has no content to look at
        parts = _parts(value) if still else []
        parts = [part.reshape(-1) for part in parts if part.is_contiguous()]
        few = [_bits(part[:: -(-part.numel() // _SAMPLE) or 1]) for part in parts]
        return _Outside(value, version(value), torch.cat(few) if few else None)

    def _own(self, tensor: Tensor) -> bool:
        known = self._inside.get(id(tensor))
        if known is not None and known() is tensor:
            return True
        if any(id(tensor) in ours for ours in self._exempt):  # a buffer's copy, an output given out
            return True
        node = tensor.grad_fn
        return node is not None and node._sequence_nr() >= self._since

    def _write(self, tensor: Tensor) -> None:
        if not self._own(tensor):
            self._written[id(tensor)] = tensor

    def _why(self, tensor: Tensor) -> str | None:
        known, reason = self._changed.get(id(tensor), (None, None))
        return reason if known is not None and known() is tensor else None

    def _follows(self, func: Any) -> bool:
        before = [] if self._before is None else self._before._calls
        return len(self._calls) <= len(before) and before[len(self._calls) - 1][0] == func

    def _compare(self, place: int, func: Any, found: list[Any]) -> str | None:
        assert self._before is not None
        if place >= len(self._before._calls):
            if self._before.blind:
                return None
            raise unrepeatable(f"it did more than before, from {called(func)} on")
        known, before = self._before._calls[place]
        if known != func:
            raise unrepeatable(f"it called {called(func)} where it had called {called(known)}")
        if len(before) != len(found):
            return f"{called(func)} was given something else than before"
        for old, new in zip(before, found, strict=True):
            if isinstance(old, _Outside):
                if not old.same_as(new):
                    return f"{called(func)} read another tensor from outside than before"
            elif old != new:
                return f"{called(func)} was given another argument than before"
        return None


_INDICES = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""What a sparse tensor is made of."""


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold the content; none where they are out of reach."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return [] if tensor.is_nested else [tensor]
    return [getattr(tensor, name)() for name in _INDICES.get(tensor.layout, ())]


def _bits(tensor: Tensor) -> Tensor:
    """The content byte by byte, so that NaN equals itself; a copy."""
    flat = [part.reshape(-1).clone().view(torch.uint8) for part in _parts(tensor)]
    if len(flat) == 1:
        return flat[0]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.device == b.device and torch.equal(a, b)
