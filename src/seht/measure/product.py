r"""Products of the Hessian over a whole data set with a vector.

.. math:: Hv = \sum_b \frac{n_b}{N} H_b v, \qquad H_b v = \nabla (g_b \cdot v)

by a double backward with operators that are right (:mod:`seht.operators.safe_forms`), micro-batch
after micro-batch (Pearlmutter, Neural Computation 6, 1994); for the Gauss-Newton matrix
:math:`J^T H_{out} J v`. Where an operator of the model has no second derivative (flash attention,
cuDNN's recurrent kernels, compiled code), by frozen differences of ordinary gradients,
:math:`(g(w + ev) - g(w - ev)) / 2e`, with their smaller precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from seht.curvature.boundary import Boundary
from seht.curvature.flat_losses import look, twice
from seht.curvature.output_curvature import slope
from seht.engines import START, refuse_compiled
from seht.estimators import SehtH
from seht.measure.data import Batches
from seht.measure.problem import Problem, empty
from seht.operators.orders import refuse_wrong
from seht.operators.safe_forms import safe_ops
from seht.replay.buffers import BorrowedBuffers
from seht.replay.groups import refuse_parallel
from seht.replay.passes import Passes
from seht.task import Task, check_loss, refuse_scripted, split
from seht.tensors.gradients import Gradient
from seht.tensors.graph import coarser, coarsest
from seht.tensors.interrupts import uninterrupted
from seht.tensors.nodes import refuse_once
from seht.tensors.solid import solid

_DIFFERENCES = {torch.float32: 1e-5, torch.float64: 1e-9}
_DOUBLE_BACKWARD = {torch.float32: 1e-6, torch.float64: 1e-13}


ONCE = (
    'take curvature="hessian", whose products can do without, or compute its backward with '
    "differentiable operations and drop the mark"
)
"""What to do about a function that has a first derivative only."""
WRONG = 'take curvature="hessian", whose products can do without'
"""What to do about an operator whose second derivative is wrong."""


class Product:
    """The symmetric operator v -> Hv on flat vectors in float64, over all micro-batches."""

    def __init__(self, problem: Problem, batches: Batches) -> None:
        self.problem, self.batches = problem, batches
        self.size = sum(tensor.numel() for tensor in problem.weights)
        self.count = 0
        """Products so far."""
        self.samples = 0
        self._dtype = problem.weights[0].dtype
        """The least precise type that gradients were seen to pass through."""
        self.differences = False
        """Whether products are made by differences."""
        self._curved = False
        """For the Gauss-Newton matrix: whether the loss's curvature was looked at."""
        refuse_parallel(problem.model)
        try:
            refuse_compiled(problem.model)
            refuse_scripted(problem.model, "autograd")
        except RuntimeError:
            self.differences = True

    @property
    def precision(self) -> float:
        """What to expect of a product, relative to its size."""
        table = _DIFFERENCES if self.differences else _DOUBLE_BACKWARD
        return table.get(self._dtype, table[torch.float32])

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv."""
        self.problem.steady()
        parts = self.unflatten(vector)
        total = torch.zeros(self.size, dtype=torch.float64)
        samples = 0
        for batch, count in self.batches:
            total += count * self._one(batch, parts)
            samples += count
        if not samples:
            raise empty()
        self.count, self.samples = self.count + 1, samples
        return total / samples

    def gradient(self) -> Tensor:
        """The gradient of the data's mean loss, flat."""
        self.problem.steady()
        total, samples = torch.zeros(self.size, dtype=torch.float64), 0
        for batch, count in self.batches:
            with torch.enable_grad(), uninterrupted(), BorrowedBuffers(self.problem.model):
                loss = check_loss(split(self.problem.closure(batch)())[0])
                parts = torch.autograd.grad(loss, self.problem.weights, materialize_grads=True)
            total += count * self.flatten(parts)
            samples += count
        if not samples:
            raise empty()
        return total / samples

    def flatten(self, parts: Sequence[Tensor]) -> Tensor:
        """One vector in float64 on the CPU."""
        return torch.cat([part.detach().double().flatten().cpu() for part in parts])

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        """One part for each weight, in its dtype and place."""
        weights = self.problem.weights
        parts = vector.split([tensor.numel() for tensor in weights])
        return [
            part.view(w.shape).to(device=w.device, dtype=w.dtype)
            for part, w in zip(parts, weights, strict=True)
        ]

    def _one(self, batch: Any, parts: list[Tensor]) -> Tensor:
        if not self.differences:
            try:
                return self._double_backward(batch, parts)
            except RuntimeError as error:
                text = str(error)
                if "double backward" not in text and "not implemented" not in text:
                    raise
                if self.problem.curvature == "ggn":
                    raise
                self.differences = True
        return self._by_differences(batch, parts)

    def _double_backward(self, batch: Any, parts: list[Tensor]) -> Tensor:
        problem, weights = self.problem, self.problem.weights
        ggn = problem.curvature == "ggn"
        boundary = Boundary(self._task(batch)) if ggn else None
        with torch.enable_grad(), uninterrupted(), BorrowedBuffers(problem.model):
            with boundary or nullcontext(), safe_ops():
                loss = check_loss(split(problem.closure(batch)())[0])
            refuse_once([loss], weights, ONCE)
            refuse_wrong(
                [loss], weights, 2, 'take curvature="hessian", whose products can do without'
            )
            self._dtype = coarser(self._dtype, coarsest([loss]))
            if boundary is not None:
                first, self._curved = not self._curved, True
                return self.flatten(_gauss_newton(loss, boundary, weights, parts, first))
            gradient = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            solid(gradient)
            pairs = [
                (g * v).sum()
                for g, v in zip(gradient, parts, strict=True)
                if g is not None and g.requires_grad
            ]
            if not pairs:
                return torch.zeros(self.size, dtype=torch.float64)
            along = torch.stack(pairs).sum()
            return self.flatten(torch.autograd.grad(along, weights, materialize_grads=True))

    def _by_differences(self, batch: Any, parts: list[Tensor]) -> Tensor:
        problem = self.problem
        if problem.curvature == "ggn":
            raise RuntimeError(
                "products with the Gauss-Newton matrix need second derivatives, which compiled or "
                "scripted code has not; pass the module as it was before"
            )
        with torch.enable_grad(), uninterrupted():
            passes = Passes(self._task(batch), types=True)
            self._dtype = coarser(self._dtype, passes.coarsest)
            passes.loss, passes.output = passes.loss.detach(), None
            sigma = dict(zip(problem.chosen.tensors, parts, strict=True))
            e = passes.weights.step(sigma, START["hessian", self._dtype])
            above: Gradient = []
            below: Gradient = []
            passes.gradient(sigma, e, above)
            passes.gradient(sigma, -e, below)
            found = {
                id(leaf): (a - b) / (2 * e)
                for leaf, a, b in zip(passes.leaves, above, below, strict=False)
                if a is not None and b is not None
            }
        return self.flatten([found.get(id(w), torch.zeros_like(w)) for w in problem.weights])

    def _task(self, batch: Any) -> Task:
        problem = self.problem
        tensors = problem.chosen.tensors
        return Task(
            problem.model,
            problem.closure(batch),
            tensors,
            tuple(range(len(tensors))),
            problem.chosen.named,
            len(tensors),
            SehtH(),
            0,
            curvature=problem.curvature,
            boundary=problem.boundary,
            differentiable=False,
        )


def _gauss_newton(
    loss: Tensor, boundary: Boundary, weights: list[Tensor], parts: list[Tensor], first: bool
) -> Sequence[Tensor]:
    """J^T H_out J v: Jv is the derivative of v . J^T u in u, by two reverse passes."""
    z = boundary.outputs
    gradient, curved = slope(loss, z) if z else ([], False)
    boundary.check(curved)
    if first:
        look(gradient, z)
    u = [torch.zeros_like(part, requires_grad=True) for part in z]
    back = torch.autograd.grad(z, weights, u, create_graph=True, allow_unused=True)
    pairs = [(b * v).sum() for b, v in zip(back, parts, strict=True) if b is not None]
    if not pairs:
        return [torch.zeros_like(w) for w in weights]
    along = torch.autograd.grad(
        torch.stack(pairs).sum(), u, retain_graph=True, materialize_grads=True
    )
    kept = [
        (g, d) for g, d in zip(gradient, along, strict=True) if g is not None and g.requires_grad
    ]
    with twice():
        curved_along = torch.autograd.grad(
            [g for g, _ in kept], z, [d for _, d in kept], retain_graph=True, materialize_grads=True
        )
    return torch.autograd.grad(z, weights, curved_along, materialize_grads=True)
