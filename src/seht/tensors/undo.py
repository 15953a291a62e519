"""A step happens completely or not at all: what to undo when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seht.tensors.graph import Stored, leaves_of, quiet
from seht.tensors.process import own_gradients


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
    before, hooked = [(leaf, leaf.grad) for leaf in leaves], _hooked(leaves)
    copies = [g.clone() if g is not None and hooked else None for _, g in before]
    try:
        yield
    except BaseException:
        for (leaf, gradient), copy in zip(before, copies, strict=True):
            if gradient is not None and copy is not None:
                gradient.data.copy_(copy)
            leaf.grad = gradient
        raise


def _hooked(leaves: Sequence[Tensor]) -> bool:
    return any(
        leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
        for leaf in leaves
    )
