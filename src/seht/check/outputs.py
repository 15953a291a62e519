r"""The numerical truth of the Gauss-Newton trace, from ordinary gradients and values only.

With z the network's outputs, L the loss as a function of them and s a probe,

.. math::

    q = J s &= \frac{z(w + e s) - z(w - e s)}{2 e} + O(e^2), \qquad t = q^T H q, \\
    H q &= \frac{L'(z + h q) - L'(z - h q)}{2 h} + O(h^2), \\
    c = \nabla_z (q^T H q) &= \frac{L'(z + h q) + L'(z - h q) - 2 L'(z)}{h^2} + O(h^2), \\
    \nabla t &= J^T c + \frac{J(w + e s)^T\, 2 H q - J(w - e s)^T\, 2 H q}{2 e} + O(e^2) .

Weights behind the outputs get the line of c with :math:`L'` their own gradient of the loss.
:math:`J^T` is a backward pass from the outputs, :math:`L'` one of the loss with other outputs in
the place of the network's. Which tensors are the outputs is said in :mod:`seht.curvature.boundary`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seht.check.sandbox import Gradient, Sandbox, ordinary
from seht.check.tape import Tape
from seht.curvature.head import find_head, find_module, returns_loss
from seht.curvature.softmax import log_softmax_dim
from seht.replay.state import BorrowedBuffers
from seht.task import check_loss, split
from seht.tensors.process import BOUNDARY
from seht.tensors.trees import mapped


class Outputs:
    """The outputs of a sandbox's network: read in one pass, replaced by given values in another."""

    def __init__(self, box: Sandbox, tape: Tape | None) -> None:
        self._box, self._tape = box, tape
        self._module = find_module(box.model, box.form.boundary)
        self._depth = 0
        self._head: nn.Module | None = None
        self._handles: list[Any] = []
        self._hooked: list[Tensor] = []
        self._marked: list[Tensor] = []
        self._given: Iterator[Tensor] | None = None
        self._marks = False
        """Whether the closure marks its outputs, which then replace the module's."""
        self._dims: list[int | None] = []
        """The dimensions of a final ``log_softmax`` of the outputs, which counts to the loss."""
        self.centre = self.values()
        self._marks = bool(self._marked)
        plain = not self._marks and box.form.boundary is None and self._head is None
        self._dims = [log_softmax_dim(z) if plain else None for z in self._found]
        self.centre_slope = self.slope(self.centre)

    def values(self, shift: Gradient | None = None, step: float = 0.0) -> list[Tensor]:
        """The outputs at ``weights + step * shift``."""
        with self._box.at(shift, step):
            self._pass()
        return [z.detach() for z in self._found]

    def pulled(
        self, rows: list[list[Tensor]], shift: Gradient | None = None, step: float = 0.0
    ) -> list[Gradient]:
        """J^T times each row, at ``weights + step * shift``."""
        leaves, how = self._box.leaves, {"allow_unused": True, "materialize_grads": True}
        with self._box.at(shift, step):
            self._pass()
            found = [
                torch.autograd.grad(
                    self._found, list(leaves.values()), row, retain_graph=True, **how
                )
                for row in rows
            ]
        return [
            {name: part.to_dense() for name, part in zip(leaves, parts, strict=True)}
            for parts in found
        ]

    def slope(self, values: list[Tensor]) -> list[Tensor]:
        """The gradient of the loss, with these values as outputs: in the outputs, and then in the
        weights behind them.
        """
        leaves = [value.clone().requires_grad_() for value in values]
        self._given = iter(leaves)
        try:
            loss = self._pass()
        finally:
            self._given = None
        inputs = [*leaves, *self._box.leaves.values()]
        found = torch.autograd.grad(loss, inputs, materialize_grads=True, allow_unused=True)
        return [part.to_dense() for part in found]

    @property
    def _found(self) -> list[Tensor]:
        return self._marked or self._hooked

    def mark(self, outputs: Any) -> Any:
        """The closure called :func:`seht.boundary`."""
        return self._seen(outputs, self._marked, marked=True)

    def _pass(self) -> Tensor:
        self._hooked, self._marked, self._depth = [], [], 0
        tape = self._tape or nullcontext()
        with ordinary(), BorrowedBuffers(self._box.model), self._watching(), tape:
            return check_loss(split(self._box.closure())[0], graph=False)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._head = None
        self._handles = [
            self._module.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._module.register_forward_hook(self._leave, always_call=True),
        ]
        token = BOUNDARY.set(self)
        try:
            yield
        finally:
            BOUNDARY.reset(token)
            for handle in self._handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> None:
        self._depth += 1
        labelled = self._box.form.boundary is None and returns_loss(kwargs)
        if labelled and self._head is None and (name := find_head(self._box.model)) is not None:
            self._head = find_module(self._box.model, name)
            self._handles.append(self._head.register_forward_hook(self._leave_head))

    def _leave_head(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return None if self._marked else self._seen(outputs, self._hooked, marked=False)

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self._depth -= 1
        if self._depth > 0 or self._marked or (self._head is not None and self._hooked):
            return None
        return self._seen(outputs, self._hooked, marked=False)

    def _seen(self, outputs: Any, found: list[Tensor], *, marked: bool) -> Any:
        def take(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or not tensor.is_floating_point():
                return tensor
            found.append(tensor)
            if self._given is None or marked != self._marks:
                return tensor
            leaf = next(self._given)
            dim = self._dims[len(found) - 1] if self._dims else None
            return leaf.clone() if dim is None else torch.log_softmax(leaf, dim)

        return mapped(outputs, take)


def gauss_newton(
    outputs: Outputs, probe: Gradient, step: float, kappa: float
) -> tuple[Gradient, Gradient]:
    """G s and the gradient of s^T G s, with the step e in the weights and kappa |z| in z."""
    plus, minus = outputs.values(probe, step), outputs.values(probe, -step)
    q = [(a - b) / (2 * step) for a, b in zip(plus, minus, strict=True)]
    centre, slope = outputs.centre, outputs.centre_slope
    h = kappa * (_norm(centre) or 1.0) / (_norm(q) or 1.0)
    up = outputs.slope([z + h * d for z, d in zip(centre, q, strict=True)])
    down = outputs.slope([z - h * d for z, d in zip(centre, q, strict=True)])
    hq = [(a - b) / (2 * h) for a, b in zip(up[: len(q)], down, strict=False)]
    bent = [((a - c) + (b - c)) / h**2 for a, b, c in zip(up, down, slope, strict=True)]
    product, gradient = outputs.pulled([hq, bent[: len(q)]])
    [ahead] = outputs.pulled([hq], probe, step)
    [back] = outputs.pulled([hq], probe, -step)
    behind = zip(gradient, bent[len(q) :], strict=True)
    return product, {n: gradient[n] + (ahead[n] - back[n]) / step + own for n, own in behind}


def _norm(parts: list[Tensor]) -> float:
    return math.sqrt(math.fsum(part.square().sum().item() for part in parts))
