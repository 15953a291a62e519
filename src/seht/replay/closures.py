"""A closure computes the loss and does nothing else; anything else is refused at once.

One penalised step runs at a time, not inside another one, nor beside one on the same weights.
While a step runs its weights are moved and its decisions are recorded. A second step inside the
closure would be recorded as a part of the network; one in another thread would take moved weights
for its own and put them back as such.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from seht.replay.replayer import in_extra_run
from seht.task import Closure, parameters_of
from seht.tensors.memory import version
from seht.tensors.process import INSIDE, OPTIMIZER_STEPS

_lock = threading.Lock()
_busy: dict[int, int] = {}
"""By identity of a weight: the thread whose step it is in."""


_WANTED = {
    "the closure": "that computes the loss: lambda: loss_fn(model(x), y)",
    "loss_fn": "loss_fn(model, batch) that returns the mean loss",
}


def check_arguments(model: Any, function: Any, name: str = "the closure") -> None:
    """Refuse a model that is no module and a function that cannot be called."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(function):
        given = type(function).__name__
        raise TypeError(f"{name} must be callable, not {given}; pass a function {_WANTED[name]}")


class Guarded:
    """The closure of a task. Refuses an optimiser's step, and gradients that it leaves in
    ``.grad``: each run would do it again, and in a plain step it is hardly meant either.
    """

    def __init__(
        self, modules: tuple[nn.Module, ...], closure: Closure, name: str = "the closure"
    ) -> None:
        self._modules, self._closure, self._name = modules, closure, name
        self._thread = threading.get_ident()

    def __call__(self) -> Any:
        """Run the closure."""
        if in_extra_run():
            return self._run()
        with torch._C.DisableTorchFunction():  # we look, not the closure
            before = [
                (p, p.grad, -1 if p.grad is None else version(p.grad))
                for p in parameters_of(self._modules)
                if p.requires_grad
            ]
        output = self._run()
        with torch._C.DisableTorchFunction():
            for p, grad, known in before:
                if p.grad is not None and _added(p.grad, grad, known):
                    raise self._left(p)
        return output

    def _left(self, p: Tensor) -> RuntimeError:
        names = self._modules[0].named_parameters()
        name = next((n for n, q in names if q is p), "a parameter")
        return RuntimeError(
            f"{self._name} leaves a gradient in {name}.grad: does it, or another thread, call "
            "backward()? It must only compute the loss; call backward() on what the penalty "
            "returns (and torch.autograd.grad for a gradient that the loss is made from)"
        )

    def _run(self) -> Any:
        handle = OPTIMIZER_STEPS(self._refuse)
        try:
            return self._closure()
        finally:
            handle.remove()

    def _refuse(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() == self._thread:  # the hook is for all threads
            raise RuntimeError(
                f"{self._name} calls {type(optimizer).__name__}.step(), and runs several times; it "
                "must only compute the loss: step after the backward pass"
            )


def _added(grad: Tensor, before: Tensor | None, known: int) -> bool:
    if grad is before and version(grad) == known:
        return False
    if before is not None and before is not grad and grad._is_view() and torch.equal(grad, before):
        return False  # DDP (gradient_as_bucket_view) has moved it into another bucket
    # zero_grad(set_to_none=False) writes, too. Only such loops pay for this comparison.
    return bool((grad.to_dense() if grad.is_sparse else grad).any())


@contextmanager
def alone(weights: Iterable[Tensor] = ()) -> Iterator[None]:
    """Refuse another step while the block runs, in this thread or on these weights."""
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
