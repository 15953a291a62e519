r"""The reference engine: the paper's Algorithms 1 and 2 as printed, by nested autograd.

Both algorithms are one loop. Algorithm 1 (SEHT-H) draws :math:`\sigma` from Rademacher over all
chosen weights, Algorithm 2 (SEHT-D) from :math:`Q(p)` over the layers drawn in this step::

    for i = 1 to maxIter:
        sigma ~ Rademacher(n)  or  Q(p)
        v = g . sigma                      (g: the gradient of the loss)
        h = dv / d omega
        t = sigma^T . h
        trace += t
    return trace / maxIter

Every step of it stays in the graph, so that the estimate itself has a gradient: a third
derivative of the loss. The fused operators that are wrong there are replaced while the closure
runs (:mod:`seht.safe_ops`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from seht.engines.base import (
    Directions,
    Estimate,
    Task,
    check_loss,
    dot,
    refuse_scripted,
    report_unused,
    split,
)
from seht.engines.boundary import Boundary
from seht.engines.buffers import BorrowedBuffers
from seht.engines.checkpoints import checkpoints
from seht.engines.curved import slope
from seht.engines.parallel import refuse_parallel
from seht.engines.precision import Casts, check_precision, prepared
from seht.engines.sharded import refuse_forms
from seht.engines.shards import find as find_shards
from seht.engines.watched import own_gradients
from seht.safe_ops import safe_ops


def refuse_per_sample(estimator: object) -> None:
    """Per-sample probes are made by rules of the other engine."""
    if getattr(estimator, "per_sample", False):
        raise ValueError(
            "estimator='seht-s' needs engine='difference' (or 'auto'): engine='autograd' has one "
            "probe for all examples"
        )


class AutogradEngine:
    """Exact to rounding for every operator with two more derivatives; some ten plain steps."""

    name = "autograd"

    def __init__(self, *, precision: str = "full") -> None:
        self.precision = check_precision(precision)

    def estimate(self, task: Task, *, lean: bool = False, watch: bool = False) -> Estimate:
        """Loss and trace with one forward pass and nested gradients; the forms are one here."""
        refuse_scripted(task.model, self.name)
        refuse_parallel(task.model)
        refuse_compiled(task.model)
        refuse_per_sample(task.estimator)
        if find_shards(task.model) is not None:
            refuse_forms(self.name, task.estimator, lean=lean)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            own_gradients(),
            prepared(task, self.precision) as (task, precision),
            BorrowedBuffers(task.model) as buffers,
        ):
            boundary = Boundary(task) if task.curvature == "ggn" else None
            casts = Casts(precision, safe_ops, partial(BorrowedBuffers, task.model))
            with boundary or nullcontext(), casts, safe_ops(), precision.run(), checkpoints():
                output = task.closure()
            loss = check_loss(split(output)[0])
            with _explained():
                if boundary is None:
                    trace, unused = hutchinson(loss, task)
                else:
                    trace, unused = gauss_newton(loss, boundary, task)
            if precision.wide or (lean and precision.apart):
                loss, trace = precision.handed_on([loss, trace])
        if not task.differentiable:
            loss, trace = loss.detach(), trace.detach()
        commit = precision.committing(buffers.commit)
        output = precision.given_out(output)
        return Estimate(loss, trace, output, unused, error=0.0, commit=commit)

    def state(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to remember."""


def hutchinson(loss: Tensor, task: Task) -> tuple[Tensor, tuple[str, ...]]:
    """The loop of Algorithms 1 and 2 over the task's probes."""
    names, omega = list(task.weights), list(task.weights.values())
    g = torch.autograd.grad(loss, omega, create_graph=True, allow_unused=True)
    unused = report_unused(task, [n for n, part in zip(names, g, strict=True) if part is None])
    gradient = {n: part for n, part in zip(names, g, strict=True) if part is not None}
    trace = loss.new_zeros(())
    for sigma in task.probes():
        trace = trace + product(gradient, sigma, task)
    return trace * (task.estimator.scale / task.estimator.probes), unused


def product(gradient: dict[str, Tensor], sigma: Directions, task: Task) -> Tensor:
    r""":math:`\sigma^T H \sigma`: two inner products and one more gradient."""
    omega = [task.weights[name] for name in gradient]
    direction = [sigma[name].to(w.dtype) for name, w in zip(gradient, omega, strict=True)]
    if not omega:
        return next(iter(task.weights.values())).new_zeros(())
    v = dot(list(gradient.values()), direction)
    if not v.requires_grad:  # the loss is linear in these weights
        return v.new_zeros(())
    h = torch.autograd.grad(
        v, omega, create_graph=task.differentiable, retain_graph=True, materialize_grads=True
    )
    return dot(list(h), direction)


def gauss_newton(loss: Tensor, boundary: Boundary, task: Task) -> tuple[Tensor, tuple[str, ...]]:
    r""":math:`z'^T H_{out} z'` with :math:`z' = J\sigma`, exactly.

    :math:`J\sigma` is the derivative of :math:`\sigma \cdot J^T u` in u (two reverse passes):
    forward mode is wrong through fused norms and has no rule for many kernels.
    """
    z = boundary.outputs
    gradient, curved = slope(loss, z) if z else ([], False)
    boundary.check(curved)
    names, omega = list(task.weights), list(task.weights.values())
    u = [torch.zeros_like(part, requires_grad=True) for part in z]
    backward = torch.autograd.grad(z, omega, u, create_graph=True, allow_unused=True)
    unused = report_unused(
        task, [n for n, part in zip(names, backward, strict=True) if part is None]
    )
    trace = loss.new_zeros(())
    for sigma in task.probes():
        pairs = [
            (part * sigma[n].to(part.dtype)).sum()
            for n, part in zip(names, backward, strict=True)
            if part is not None
        ]
        if not pairs:
            break
        direction = torch.autograd.grad(
            torch.stack(pairs).sum(), u, create_graph=True, materialize_grads=True
        )
        kept = [
            (g, d)
            for g, d in zip(gradient, direction, strict=True)
            if g is not None and g.requires_grad
        ]
        product = torch.autograd.grad(
            [g for g, _ in kept],
            z,
            [d for _, d in kept],
            create_graph=True,
            materialize_grads=True,
        )
        trace = trace + dot(list(product), list(direction))
    return trace * (task.estimator.scale / task.estimator.probes), unused


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where PyTorch only says what is missing."""
    try:
        yield
    except CheckpointError as error:
        raise RuntimeError(
            "activation checkpointing recomputes its part of the model in the backward pass, where "
            "engine='autograd' cannot replace what is wrong at the third order; switch it off on "
            "penalised steps"
        ) from error
    except RuntimeError as error:
        if "double backward" in str(error) or "not implemented" in str(error):
            raise RuntimeError(
                f"an operator of the model has no second derivative ({error}); "
                "use engine='difference', which needs first derivatives only"
            ) from error
        raise


def refuse_compiled(model: nn.Module) -> None:
    """Compiled code has no double backward."""
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            raise RuntimeError(
                f"{'module ' + repr(name) if name else 'the model'} is compiled, and torch.compile "
                "has no double backward, which engine='autograd' needs; pass the uncompiled "
                "module, or use engine='difference'"
            )
