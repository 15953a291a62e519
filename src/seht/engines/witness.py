"""Whether a closure repeats itself: the sequence of its operations and what they read.

A hidden state carried in an outer variable, another batch drawn inside, random numbers from
elsewhere: each shows as another operation, another number or another outside tensor. Looking costs
some 40 microseconds per operation, so it is done on the first steps and now and then; the cheap
guards of :mod:`seht.engines.replay` watch the rest.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from seht.engines.kinks import IN_PLACE

_FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class UnrepeatableError(RuntimeError):
    """The closure did something else when it ran again."""


def unrepeatable(what: str) -> UnrepeatableError:
    """The error, with what to do about it."""
    return UnrepeatableError(
        f"the closure cannot be repeated: {what}. It runs several times in a penalised step and "
        "must compute the same loss each time: draw the batch and read hidden states before it, "
        "return new states as aux, and use torch's own random numbers"
    )


class Witness:
    """Notes what a pass does; a second one compares a later pass with it."""

    def __init__(self, since: int, exempt: set[int], before: Witness | None = None) -> None:
        self._since = since
        self._exempt = exempt
        self._before = before
        self._inside: dict[int, weakref.ref[Tensor]] = {}
        self._calls: list[tuple[Any, list[Any]]] = []
        self._blind: bool = before is not None and before._blind and not before._calls

    def see(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a call: what it is given."""
        if self._blind or isinstance(func, OpOverload) or name(func).startswith("_set_"):
            self._blind = True  # compiled code, whose inside differs between the passes
            return
        target = args[0] if func in IN_PLACE and args else None
        found: list[Any] = []
        self._describe((args, kwargs), target, found)
        place = len(self._calls)
        self._calls.append((func, found))
        if self._before is not None:
            self._compare(place, func, found)

    def made(self, func: Any, out: Any) -> None:
        """After a call: its results are the closure's own."""
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._inside[id(tensor)] = weakref.ref(tensor)
                if func in _FROM_NUMBERS and self._calls and not self._blind:
                    self._calls[-1][1].append(("values", tensor.detach().flatten()[:16].tolist()))

    def finish(self) -> None:
        """Nothing may be missing at the end."""
        if self._before is None or self._blind or self._before._blind:
            return
        if len(self._calls) < len(self._before._calls):
            func = self._before._calls[len(self._calls)][0]
            raise unrepeatable(f"it never came to {name(func)} again")

    def _describe(self, value: Any, target: Any, found: list[Any]) -> None:
        if isinstance(value, Tensor):
            found.append(("shape", tuple(value.shape), value.dtype))
            if value is not target and not self._own(value):
                # The reference keeps the tensor alive, so that its identity means something.
                found.append((value, value._version))
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._describe(item, target, found)
        elif isinstance(value, dict):
            for key, item in value.items():
                found.append(key)
                self._describe(item, target, found)
        elif isinstance(value, (int, float, str, bool, type(None))):
            found.append(repr(value))
        elif isinstance(value, slice):
            self._describe((value.start, value.stop, value.step), target, found)
        else:
            found.append(type(value))

    def _own(self, tensor: Tensor) -> bool:
        known = self._inside.get(id(tensor))
        if (known is not None and known() is tensor) or id(tensor) in self._exempt:
            return True
        node = tensor.grad_fn
        return node is not None and node._sequence_nr() >= self._since

    def _compare(self, place: int, func: Any, found: list[Any]) -> None:
        assert self._before is not None
        if place >= len(self._before._calls):
            if self._before._blind:
                return
            raise unrepeatable(f"it did more than before, from {name(func)} on")
        known, before = self._before._calls[place]
        if known != func:
            raise unrepeatable(f"it called {name(func)} where it had called {name(known)}")
        before = [b for b in before if not (isinstance(b, tuple) and b[0] == "values")]
        if len(before) != len(found):
            raise unrepeatable(f"{name(func)} was given something else than before")
        for old, new in zip(before, found, strict=True):
            if not _same(old, new):
                outside = isinstance(new, tuple) and isinstance(new[0], Tensor)
                what = (
                    "read another tensor from outside" if outside else "was given another argument"
                )
                raise unrepeatable(f"{name(func)} {what} than before")

    def compare_values(self) -> None:
        """Tensors made from Python numbers must hold the same numbers."""
        if self._before is None:
            return
        for (func, old), (_, new) in zip(self._before._calls, self._calls, strict=False):
            if func in _FROM_NUMBERS and repr(old) != repr(new):
                raise unrepeatable(f"{name(func)} was given other numbers than before")


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and isinstance(old[0], Tensor):
        if not (isinstance(new, tuple) and isinstance(new[0], Tensor)):
            return False
        if old[0] is new[0]:
            return bool(old[1] == new[1])
        # Made anew in each run (from_numpy, say): the same as long as it holds the same.
        return old[0].shape == new[0].shape and torch.equal(old[0], new[0])
    return bool(old == new)


def name(func: Any) -> str:
    """What to call a function in a message."""
    return getattr(func, "__name__", str(func))
