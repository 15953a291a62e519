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

import torch
from torch import Tensor, nn

from seht.engines.base import Directions, Estimate, Task, check_loss, dot, report_unused, split
from seht.engines.buffers import BorrowedBuffers
from seht.safe_ops import safe_ops


class AutogradEngine:
    """Exact to rounding for every operator with two more derivatives; some ten plain steps."""

    name = "autograd"

    def estimate(self, task: Task) -> Estimate:
        """Loss and trace with one forward pass and nested gradients."""
        refuse_opaque(task.model)
        buffers = BorrowedBuffers(task.model)
        with torch.inference_mode(False), torch.enable_grad(), buffers:
            with safe_ops():
                output = task.closure()
            loss = check_loss(split(output)[0])
            trace, unused = hutchinson(loss, task)
        if not task.differentiable:
            loss, trace = loss.detach(), trace.detach()
        return Estimate(loss, trace, output, unused, error=0.0, commit=buffers.commit)


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
    try:
        h = torch.autograd.grad(
            v,
            omega,
            create_graph=task.differentiable,
            retain_graph=True,
            materialize_grads=True,
        )
    except RuntimeError as error:
        if "double backward" in str(error) or "not implemented" in str(error):
            raise RuntimeError(
                f"an operator of the model has no second derivative ({error}); "
                "use engine='difference', which needs first derivatives only"
            ) from error
        raise
    return dot(list(h), direction)


def refuse_opaque(model: nn.Module) -> None:
    """Compiled and scripted code hides its operators, so that none could be made safe."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise RuntimeError(
                f"{where} is scripted, which hides its operators from engine='autograd'; "
                "pass the module as it was before torch.jit"
            )
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            raise RuntimeError(
                f"{where} is compiled, and torch.compile has no double backward, which "
                "engine='autograd' needs; pass the uncompiled module, or use engine='difference'"
            )
