"""Whether autograd keeps what a backward pass would need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class GraphNeeded(RuntimeError):
    """A gradient was asked for of which the graph had been dropped."""


def wants_graph(error: BaseException) -> bool:
    """Whether an error came because nothing is kept: a gradient inside the closure."""
    # torch.func refuses to work beside the hooks below.
    return isinstance(error, GraphNeeded) or "support saved tensor hooks" in str(error)


class Dropped:
    """Whether what autograd saves for a backward pass is dropped at the moment."""

    def __init__(self) -> None:
        self.on = True

    def switch(self, on: bool) -> None:
        """From here on it is dropped, or kept."""
        self.on = on


@contextmanager
def dropping() -> Iterator[Dropped]:
    """Nothing is kept for a backward pass in the block: the graph says who depends on whom, and
    no more. Where a rule needs a derivative it asks for :func:`kept_graph`.
    """
    state = Dropped()

    def pack(tensor: Tensor) -> Tensor | None:
        return None if state.on else _apart(tensor)

    def unpack(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise GraphNeeded(
                "a gradient was asked for inside a closure that is measured without a graph"
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield state


@contextmanager
def kept_graph() -> Iterator[None]:
    """An ordinary graph in the block, whatever surrounds it."""
    if torch.compiler.is_compiling():
        with torch.enable_grad():
            yield
    else:
        same = torch.autograd.graph.saved_tensors_hooks(_apart, lambda tensor: tensor)
        with torch.enable_grad(), same:
            yield


def _apart(tensor: Tensor) -> Tensor:
    """The tensor without its history, which autograd gives back itself: a result that is saved
    with it would hold the node that holds the result, and neither would ever go.
    """
    with torch._C.DisableTorchFunction():  # no operation of the model
        return tensor.detach()
