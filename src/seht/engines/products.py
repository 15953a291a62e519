r"""Derivatives of one (micro-)batch's loss for measuring: gradients and products with a vector.

.. math:: Hv = \nabla (g \cdot v), \qquad Gv = J^T H_{out} J v

by a double backward with operators that are right (:mod:`seht.operators.safe_forms`; Pearlmutter,
Neural Computation 6, 1994). Where an operator of the model has no second derivative (flash
attention, cuDNN's recurrent kernels, compiled code), by frozen differences of ordinary gradients,
:math:`(g(w + ev) - g(w - ev)) / 2e`, with their smaller precision.

With :mod:`seht.engines.forward_only` this is all that :mod:`seht.measure` asks of the engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from seht.curvature.boundary import Boundary
from seht.curvature.flat_losses import look
from seht.curvature.output_curvature import bent_along, slope
from seht.distributed import LOCAL
from seht.engines.autograd import pulled_back, refuse_compiled
from seht.engines.step_size import START
from seht.estimators import SehtH
from seht.operators.orders import refuse_wrong
from seht.operators.safe_forms import safe_ops
from seht.probes import Chosen
from seht.replay.centre import Plan
from seht.replay.state import BorrowedBuffers
from seht.task import Closure, Task, check_loss, refuse_parallel, refuse_scripted, split
from seht.tensors.gradients import Gradient
from seht.tensors.graph import coarser, survey
from seht.tensors.second_derivatives import refuse_once, solid
from seht.tensors.undo import uninterrupted

_HESSIAN = 'take curvature="hessian", whose products can do without'
_ONCE = f"{_HESSIAN}, or compute its backward with differentiable operations and drop the mark"


class Products:
    """Products of a closure's Hessian or Gauss-Newton matrix in the chosen weights."""

    def __init__(
        self, model: nn.Module, chosen: Chosen, curvature: str, boundary: str | None
    ) -> None:
        self._model, self._chosen = model, chosen
        self._curvature, self._boundary = curvature, boundary
        self._weights = list(chosen.tensors.values())
        self._dtype = self._weights[0].dtype
        """The least precise type that gradients were seen to pass through."""
        self.differences = False
        """Whether products are made by differences."""
        self._curved = False
        """For the Gauss-Newton matrix: whether the loss's curvature was looked at."""
        modules = tuple(model.modules())
        refuse_parallel(modules)
        try:
            refuse_compiled(model)
            refuse_scripted(modules, "autograd")
        except RuntimeError:
            self.differences = True

    def gradient(self, closure: Closure) -> Sequence[Tensor]:
        """The gradient of the closure's loss."""
        with torch.enable_grad(), uninterrupted(), BorrowedBuffers(self._model):
            loss = check_loss(split(closure())[0])
            return torch.autograd.grad(loss, self._weights, materialize_grads=True)

    def __call__(self, closure: Closure, parts: list[Tensor]) -> Sequence[Tensor]:
        """The matrix times a vector, of which there is a part for each weight."""
        if not self.differences:
            try:
                return self._double_backward(closure, parts)
            except RuntimeError as error:
                text = str(error)
                if "double backward" not in text and "not implemented" not in text:
                    raise
                if self._curvature == "ggn":
                    raise
                self.differences = True
        return self._by_differences(closure, parts)

    def _double_backward(self, closure: Closure, parts: list[Tensor]) -> Sequence[Tensor]:
        weights = self._weights
        boundary = Boundary(self._task(closure)) if self._curvature == "ggn" else None
        with torch.enable_grad(), uninterrupted(), BorrowedBuffers(self._model):
            with boundary or nullcontext(), safe_ops():
                loss = check_loss(split(closure())[0])
            refuse_once([loss], weights, _ONCE)
            refuse_wrong([loss], weights, 2, _HESSIAN)
            self._dtype = coarser(self._dtype, survey([loss]).coarsest)
            if boundary is not None:
                first, self._curved = not self._curved, True
                return _gauss_newton(loss, boundary, weights, parts, first)
            gradient = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            solid(gradient)
            pairs = [
                (g * v).sum()
                for g, v in zip(gradient, parts, strict=True)
                if g is not None and g.requires_grad
            ]
            if not pairs:
                return [torch.zeros_like(w) for w in weights]
            along = torch.stack(pairs).sum()
            return torch.autograd.grad(along, weights, materialize_grads=True)

    def _by_differences(self, closure: Closure, parts: list[Tensor]) -> Sequence[Tensor]:
        if self._curvature == "ggn":
            raise RuntimeError(
                "products with the Gauss-Newton matrix need second derivatives, which compiled or "
                "scripted code has not; pass the module as it was before"
            )
        with torch.enable_grad(), uninterrupted():
            passes = LOCAL.passes(Plan(self._task(closure)))
            self._dtype = coarser(self._dtype, passes.coarsest)
            passes.forget()
            sigma = dict(zip(self._chosen.tensors, parts, strict=True))
            e = passes.weights.step(sigma, START["hessian", self._dtype])
            above: Gradient = []
            below: Gradient = []
            passes.gradient(sigma, e, above)
            passes.gradient(sigma, -e, below)
            found = {
                id(leaf): (a - b) / (2 * e)
                for leaf, a, b in zip(passes.leaves.tensors, above, below, strict=False)
                if a is not None and b is not None
            }
        return [found.get(id(w), torch.zeros_like(w)) for w in self._weights]

    def _task(self, closure: Closure) -> Task:
        return Task.to_measure(
            self._model, closure, self._chosen, SehtH(), 0, self._curvature, self._boundary
        )


@contextmanager
def loss_in_logits(
    model: nn.Module, closure: Closure, chosen: Chosen, boundary: str | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's one output z and dL/dz, which can be differentiated again inside the block."""
    task = Task.to_measure(model, closure, chosen, SehtH(), 0, "ggn", boundary)
    marks = Boundary(task, cut=True)
    with torch.enable_grad(), uninterrupted(), BorrowedBuffers(model):
        with marks:
            loss = check_loss(split(closure())[0])
        outputs = marks.outputs
        if len(outputs) != 1:
            raise ValueError(
                f"the model puts out {len(outputs)} tensors with a gradient, any of which may hold "
                'the logits; name their module with boundary="module.name"'
            )
        (found,), curved = slope(loss, outputs)
        gradient = torch.zeros_like(outputs[0]) if found is None else found
        marks.check(curved)
        look([gradient], outputs)
        yield outputs[0], gradient


def _gauss_newton(
    loss: Tensor, boundary: Boundary, weights: list[Tensor], parts: list[Tensor], first: bool
) -> Sequence[Tensor]:
    """J^T H_out J v: Jv is the derivative of v . J^T u in u, by two reverse passes."""
    z = boundary.outputs
    gradient, curved = slope(loss, z) if z else ([], False)
    boundary.check(curved)
    if first:
        look(gradient, z)
    u, back = pulled_back(z, weights)
    pairs = [(b * v).sum() for b, v in zip(back, parts, strict=True) if b is not None]
    if not pairs:
        return [torch.zeros_like(w) for w in weights]
    along = torch.autograd.grad(
        torch.stack(pairs).sum(), u, retain_graph=True, materialize_grads=True
    )
    product = bent_along(gradient, z, along, graph=False)
    return torch.autograd.grad(z, weights, product, materialize_grads=True)
