"""The random state that the runs of a closure begin with, and where they leave it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class HostRandom:
    """The global random numbers of Python and NumPy, for closures that draw from them (layer drop).

    They are read before and after the first run of a closure, and touched only where it moved
    them: another thread may draw from them meanwhile. NumPy is not imported for it.
    """

    def __init__(self) -> None:
        self._start = _host()
        self._end: dict[str, Any] | None = None
        self._moved = list(self._start)  # until more is known

    @property
    def ended(self) -> bool:
        """Whether the first run has ended."""
        return self._end is not None

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
    # Through the package, which loads its random module when it is first asked for: what a later
    # run draws from it has to begin in a known place, even if nobody drew from it before.
    if numpy := sys.modules.get("numpy"):
        found["numpy.random"] = numpy.random.get_state(legacy=False)
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

    def __init__(
        self,
        tensors: Iterable[Tensor],
        above: RandomState | None = None,
        host: HostRandom | None = None,
    ) -> None:
        self._cuda = sorted({t.device for t in tensors if t.is_cuda}, key=str)
        self._own: list[tuple[torch.Generator, Tensor]] = []
        self._met: list[torch.Generator] = []
        """Those that the present pass has met, if it is a later one."""
        self._above = above
        """Another state that is told of generators, too."""
        self._host = host or HostRandom()

    def for_passes(self) -> RandomState:
        """The state for passes that begin where this one was made."""
        found = RandomState((), self, None if self._host.ended else self._host)
        found._cuda = self._cuda
        return found

    def meet(self, generator: torch.Generator | None) -> None:
        """A generator of the user's own: remember where it was when first seen."""
        if generator is not None and not any(generator is known for known, _ in self._own):
            self._own.append((generator, generator.get_state()))
        if self._above is not None:
            self._above.meet(generator)

    def meet_again(self, generator: torch.Generator) -> bool:
        """A generator met in a later pass: whether it starts as the one that the first pass met at
        this place. One that a closure makes anew in each run takes the place of the other.
        """
        if any(generator is known for known in self._met):
            return True
        place = len(self._met)
        self._met.append(generator)
        if place >= len(self._own):
            return False
        known, first = self._own[place]
        if generator is not known and not torch.equal(generator.get_state(), first):
            return False
        self._own[place] = (generator, first)
        return True

    def begin(self, state: list[Tensor]) -> None:
        """Go back to where a pass begins: the global state given, own generators as first seen."""
        self._met = []
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
        """A function that restores the present state, and own generators as first seen."""
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


def seed_cpu(seed: int) -> None:
    """Seed torch (on the CPU alone), ``random`` and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Restore the random states of torch, ``random`` and NumPy after the block."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if cuda else []
    host = HostRandom()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        host.begin()
