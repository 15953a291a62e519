"""A step happens completely or not at all: what to undo when it fails, and Ctrl-C, held back while
something has to be put back, and handed on afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from seht.tensors.gradients import Stored
from seht.tensors.graph import leaves_of, quiet
from seht.tensors.process import INTERRUPT, own_gradients

_urgent: list[bool] = []
"""Not empty while a second Ctrl-C waits for a place to break in."""


class _Hold:
    """A Ctrl-C that comes meanwhile is noted, and handed on to ``handler`` later."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self._pending: list[tuple[int, FrameType | None]] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        self._pending.append((number, frame))
        if len(self._pending) == 2:
            _urgent.append(True)
        elif len(self._pending) > 2:
            self.handler(number, frame)

    def deliver(self) -> None:
        pending, self._pending = self._pending, []
        _urgent.clear()
        if pending:
            self.handler(*pending[0])


_holds: list[_Hold] = []
"""The one that is on in the main thread."""


def _hold() -> _Hold | None:
    if not _holds or threading.current_thread() is not threading.main_thread():
        return None
    return _holds[0]


def uninterrupted() -> AbstractContextManager[None]:
    """Hold back a Ctrl-C until the block has put everything back.

    A second one breaks in before the next operation of the closure (:func:`break_in`), a third one
    at once, wherever that may be. A block inside another is a part of it.
    """
    if _holds or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    previous = INTERRUPT.read()
    return _held(previous) if callable(previous) else nullcontext()


@contextmanager
def _held(previous: Callable[..., Any]) -> Iterator[None]:
    hold = _Hold(previous)
    try:
        INTERRUPT.write(hold.note)
        _holds.append(hold)
        yield
    finally:
        _holds.clear()
        INTERRUPT.write(previous)
        hold.deliver()


def deliver() -> None:
    """Inside :func:`uninterrupted`, where everything can still be taken back: hand on a Ctrl-C that
    waits.
    """
    hold = _hold()
    if hold is not None:
        hold.deliver()


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside :func:`uninterrupted`: a Ctrl-C breaks in at once, as the code is the user's own."""
    hold = _hold()
    if hold is None:
        yield
        return
    hold.deliver()
    INTERRUPT.write(hold.handler)
    try:
        yield
    finally:
        INTERRUPT.write(hold.note)


def break_in() -> None:
    """Raise if a second Ctrl-C waits: called between the operations of a closure, where an
    exception finds everything in order, as one of the closure's own would.
    """
    if _urgent and threading.current_thread() is threading.main_thread():
        _urgent.clear()
        raise KeyboardInterrupt


class Undo:
    """Remembers how to take things back, and does so if the block fails."""

    def __init__(self) -> None:
        self._ways: list[Callable[[], None]] = []

    def add(self, way: Callable[[], None]) -> None:
        """One more thing to take back, before those that were added earlier."""
        self._ways.append(way)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for way in reversed(self._ways):
                way()


def differentiated(total: Tensor, scaler: Any = None) -> Tensor:
    """The same scalar, its gradient computed already: handing it out is all that is left to do.

    A backward pass through the network may fail half-way (a function of the user's, lack of memory)
    with some of the leaves served and the others not. With a ``scaler`` the pass runs at its scale,
    where half precision does not underflow.
    """
    leaves = leaves_of([total])
    scale = torch.ones_like(total) if scaler is None else scaler.scale(torch.ones_like(total))
    with own_gradients(), quiet(leaves):
        gradients = torch.autograd.grad(total, leaves, scale, allow_unused=True)
    back: Tensor = Stored.apply(total.detach(), gradients, [1 / scale] * len(leaves), *leaves)
    return back


@contextmanager
def kept_gradients(total: Tensor) -> Iterator[None]:
    """Around the backward pass of such a scalar: if a hook of the user's fails, ``.grad`` is as it
    was. Copies are made only where there are hooks.
    """
    leaves = leaves_of([total])
    before = [(leaf, leaf.grad) for leaf in leaves]
    hooked = any(
        leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
        for leaf in leaves
    )
    copies = [g.clone() if g is not None and hooked else None for _, g in before]
    try:
        yield
    except BaseException:
        for (leaf, gradient), copy in zip(before, copies, strict=True):
            if gradient is not None and copy is not None:
                gradient.data.copy_(copy)
            leaf.grad = gradient
        raise
