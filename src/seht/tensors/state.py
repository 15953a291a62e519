"""What the passes of one estimate share and must give back: random state, weights, interrupts."""

from __future__ import annotations

import math
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from seht.task import Directions


class HostRandom:
    """The global random numbers of Python and NumPy, for closures that draw from them (layer drop).

    They are read before and after the first run of a closure, and touched only where it moved
    them: another thread may draw from them meanwhile. NumPy is not imported for it.
    """

    def __init__(self) -> None:
        self._start = _host()
        self._end: dict[str, Any] | None = None
        self._moved = list(self._start)  # until more is known

    def end(self) -> None:
        """The first run has ended."""
        self._end = _host()
        self._moved = [k for k, v in self._start.items() if not _same(v, self._end[k])]

    def begin(self) -> None:
        """Go back to where the first run began."""
        self._write(self._start)

    def restore(self) -> None:
        """Go to where the first run ended."""
        if self._end is not None:
            self._write(self._end)

    def _write(self, state: dict[str, Any]) -> None:
        if "random" in self._moved:
            random.setstate(state["random"])
        if "numpy.random" in self._moved:
            sys.modules["numpy.random"].set_state(state["numpy.random"])


def _host() -> dict[str, Any]:
    found: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy.random"] = numpy.get_state(legacy=False)
    return found


def _same(a: Any, b: Any) -> bool:
    """Whether two states are one; NumPy's are dictionaries with an array in them."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return bool(a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b)


class RandomState:
    """The random state of the CPU, of the accelerators in use and of generators met on the way.

    It is made right before the first run of a closure: the global random numbers of Python and
    NumPy begin there in every run (:meth:`begin`), and end where that run left them
    (:meth:`finish`).
    """

    def __init__(self, tensors: Iterable[Tensor], above: RandomState | None = None) -> None:
        self._cuda = sorted({t.device for t in tensors if t.is_cuda}, key=str)
        self._own: list[tuple[torch.Generator, Tensor]] = []
        self._above = above
        """Who wants to hear of generators, too."""
        self._host = HostRandom()

    def meet(self, generator: torch.Generator | None) -> None:
        """A generator of the user's own: remember where it was when first seen."""
        if generator is not None and not any(generator is known for known, _ in self._own):
            self._own.append((generator, generator.get_state()))
        if self._above is not None:
            self._above.meet(generator)

    def meet_again(self, place: int, generator: torch.Generator) -> bool:
        """The generator met as number ``place`` in a later pass: whether it starts as the first
        pass's did. One that a closure makes anew in each run takes the place of the other.
        """
        if place >= len(self._own):
            return False
        known, first = self._own[place]
        if generator is not known and not torch.equal(generator.get_state(), first):
            return False
        self._own[place] = (generator, first)
        return True

    def begin(self, state: list[Tensor]) -> None:
        """Go back to where a pass begins: the global state given, own generators as first seen."""
        self._host.begin()
        self.write(state[: 1 + len(self._cuda)])
        for generator, first in self._own:
            generator.set_state(first)

    def end(self) -> list[Tensor]:
        """The first run of the closure has ended: the state that it leaves."""
        self._host.end()
        return self.read()

    def finish(self, state: list[Tensor]) -> None:
        """Another run has ended: go to the state that the first one left."""
        self._host.restore()
        self.write(state)

    def read(self) -> list[Tensor]:
        """A copy of the state: 5 kB and some microseconds."""
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._cuda)]
        return states + [generator.get_state() for generator, _ in self._own]

    def write(self, state: list[Tensor]) -> None:
        """Go (back) to a state; generators met later keep theirs."""
        torch.set_rng_state(state[0])
        for device, part in zip(self._cuda, state[1:], strict=False):
            torch.cuda.set_rng_state(part, device)
        own = state[1 + len(self._cuda) :]
        for (generator, _), part in zip(self._own, own, strict=False):
            generator.set_state(part)

    def equals(self, state: list[Tensor]) -> bool:
        """Whether the state is now this one."""
        return all(torch.equal(a, b) for a, b in zip(self.read(), state, strict=False))

    def back(self) -> Callable[[], None]:
        """The way back to where everything is now; own generators to where they were first seen."""
        return partial(self.begin, self.read())

    @contextmanager
    def undone(self) -> Iterator[None]:
        """If the block fails, the state is as before it."""
        back = self.back()
        try:
            yield
        except BaseException:
            back()
            raise

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the state as it was before the block, which is torch's own."""
        state = self.read()
        try:
            yield
        finally:
            self.write(state)

    @contextmanager
    def all_kept(self) -> Iterator[None]:
        """The same around a block that may draw from Python and NumPy: as when this was made."""
        try:
            with self.kept():
                yield
        finally:
            self._host.begin()


class Weights:
    """The drawn tensors: moved along a probe in place, and restored bit for bit.

    In place and past the version counter, so that every use of a weight moves (tied, captured,
    compiled), the leaves of a perturbed graph are the leaves of the centre's, and the centre's
    pending backward finds its saved weights as it left them.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self._saved: dict[str, Tensor] = {}
        self.still: set[str] = set()
        """Tensors that stay where they are: every example moves along a direction of its own."""
        self._away = False

    def step(self, sigma: Directions, kappa: float) -> Tensor:
        """One e for all drawn tensors, relative to weights and probe: kappa |w| / |sigma|.

        It stays on the device, as every number of the engine does: nothing waits for the host.
        """
        if getattr(sigma, "signs", False):  # every entry is 1 or -1: nothing to look at
            length = root_of_count(self._weights.values())
        else:
            length = norm(sigma[n] for n in self._weights)
        return step_size(norm(self._weights.values()), length, kappa)

    def lengths(self, sigma: Directions) -> tuple[Tensor, Tensor]:
        """The norms of each drawn tensor and of its part of the probe."""
        sizes = torch.stack([norm([w]) for w in self._weights.values()])
        return sizes, torch.stack([norm([sigma[n]]) for n in self._weights])

    def within(self, sigma: Directions, reach: dict[str, float]) -> Tensor:
        """The largest e at which no tensor moves further than its reach, relative to its size."""
        sizes, parts = self.lengths(sigma)
        most = sizes.new_tensor([reach.get(n, math.inf) for n in self._weights])
        each = torch.where((sizes > 0) & (parts > 0), most * sizes / parts, math.inf)
        return each.min()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Around several passes: the weights are restored once, at the end of the block.

        In between nobody may look at them.
        """
        self._away = True
        try:
            yield
        finally:
            self._away = False
            self._restore()

    @contextmanager
    def moved(self, sigma: Directions, step: Tensor | float) -> Iterator[None]:
        """The weights are w + step * sigma while the block runs."""
        if not self._saved:
            self._saved = {
                name: w.detach().clone()
                for name, w in self._weights.items()
                if name not in self.still
            }
        try:
            self._move(sigma, step, self._saved)
            yield
        finally:
            if not self._away:
                self._restore()

    def _restore(self) -> None:
        for name, saved in self._saved.items():
            self._weights[name].data.copy_(saved)

    @contextmanager
    def back(self, sigma: Directions, step: Tensor | float, names: Iterable[str]) -> Iterator[None]:
        """Inside :meth:`moved`: some of the weights are where they were while the block runs."""
        names = [name for name in names if name in self._saved]
        for name in names:
            self._weights[name].data.copy_(self._saved[name])
        yield
        self._move(sigma, step, names)

    def _move(self, sigma: Directions, step: Tensor | float, names: Iterable[str]) -> None:
        for name in names:
            w = self._weights[name].data
            e = torch.as_tensor(step, dtype=w.dtype, device=w.device)
            w.copy_(sigma[name])
            torch.addcmul(self._saved[name], w, e, out=w)


def step_size(size: Tensor, length: Tensor, kappa: float) -> Tensor:
    """kappa |w| / |sigma|; of 1 where the weights, or the entries that SEHT-D drew, are all 0."""
    return kappa * torch.where(size > 0, size, 1.0) / torch.where(length > 0, length, 1.0)


def root_of_count(tensors: Iterable[Tensor]) -> Tensor:
    """The common norm of as many signs."""
    known = list(tensors)
    count = sum(t.numel() for t in known)
    return torch.full((), count**0.5, dtype=torch.float64, device=known[0].device)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """The common norm of several tensors."""
    wide = (t.detach() if t.is_floating_point() else t.detach().float() for t in tensors)
    return torch.stack([torch.linalg.vector_norm(t).double() for t in wide]).norm()


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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back a Ctrl-C until the block has put everything back.

    A second one breaks in before the next operation of the closure (:func:`break_in`), a third one
    at once, wherever that may be. A block inside another is a part of it.
    """
    previous: Callable[..., Any] | int | None = None
    if threading.current_thread() is threading.main_thread() and not _holds:
        previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):
        yield
        return
    hold = _Hold(previous)
    try:
        signal.signal(signal.SIGINT, hold.note)
        _holds.append(hold)
        yield
    finally:
        _holds.clear()
        signal.signal(signal.SIGINT, previous)
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
    signal.signal(signal.SIGINT, hold.handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, hold.note)


def break_in() -> None:
    """Raise if a second Ctrl-C waits: called between the operations of a closure, where an
    exception finds everything in order, as one of the closure's own would.
    """
    if _urgent and threading.current_thread() is threading.main_thread():
        _urgent.clear()
        raise KeyboardInterrupt
