"""One penalised step at a time: not inside another one, nor beside one on the same weights.

While a step runs its weights are moved and its decisions are recorded. A second step inside the
closure would be recorded as a part of the network; one in another thread would take moved weights
for its own and put them back as such.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from seht.tensors.process import INSIDE

_lock = threading.Lock()
_busy: dict[int, int] = {}
"""By identity of a weight: the thread whose step it is in."""


def busy() -> dict[int, int]:
    """The weights that are in a step now, with the threads they are in."""
    return dict(_busy)


@contextmanager
def alone(weights: Iterable[Tensor] = ()) -> Iterator[None]:
    """Nothing else of ours may run in the block, here or on these weights."""
    if INSIDE.get():
        raise RuntimeError(
            "penalties cannot be nested: this call runs in the closure of another one, which "
            "repeats it; call both with plain closures and add the results"
        )
    mine = [id(weight) for weight in weights]
    with _lock:
        if any(weight in _busy for weight in mine):
            raise RuntimeError(
                "another thread is in a penalised step of the same weights, which moves them; give "
                "each thread a copy of the model, or hold one lock around each step"
            )
        _busy.update(dict.fromkeys(mine, threading.get_ident()))
    token = INSIDE.set(True)
    try:
        yield
    finally:
        INSIDE.reset(token)
        with _lock:
            for weight in mine:
                _busy.pop(weight, None)
