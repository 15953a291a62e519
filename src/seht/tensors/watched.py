"""Frameworks that watch over ``backward()``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
_FLAG = "_in_fabric_backward"


@contextmanager
def own_gradients() -> Iterator[None]:
    """Let the gradients of our passes through.

    In mixed precision Fabric refuses every gradient that is not taken by ``fabric.backward(loss)``:
    ``loss.backward()`` would forget its scaler. The gradients inside a penalised step want no
    scaler. What the user does afterwards is watched as before.
    """
    found = [m for name in _FABRIC if hasattr(m := sys.modules.get(name), _FLAG)]
    before = [getattr(module, _FLAG) for module in found]
    for module in found:
        setattr(module, _FLAG, True)
    try:
        yield
    finally:
        for module, value in zip(found, before, strict=True):
            setattr(module, _FLAG, value)
