r"""The centre's backward pass, run by us inside the user's ``backward()``.

In the scalar form the centre's gradient is multiplied by :math:`1 - 2\lambda/e^2`, a number in the
thousands, and cancels against what the perturbed passes found. It must be computed in the same
precision as they were. The user's ``backward()`` may run under autocast, with TF32 allowed, with a
loss in half precision or a ``GradScaler``'s factor on top; so one node stands for the whole graph
of the centre, differentiates it as the perturbed passes were, and scales the result afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seht.tensors.gradients import dense, once
from seht.tensors.graph import quiet
from seht.tensors.undo import uninterrupted


class Deferred(torch.autograd.Function):
    """The roots of a graph and its leaves, as functions of the tensors that the gradient is for."""

    @staticmethod
    def forward(
        ctx: Any,
        precision: Any,
        keep: bool,
        roots: list[Tensor],
        leaves: list[Tensor],
        *targets: Tensor,
    ) -> tuple[Tensor, ...]:
        """Aliases of both; a root in half precision comes out in float32.

        ``precision`` is a :class:`seht.precision.policy.Precision`, that of the passes.
        """
        ctx.precision, ctx.keep = precision, keep
        ctx.roots, ctx.leaves = roots, leaves
        ctx.set_materialize_grads(False)
        outs = [r.detach() if r.dtype == torch.float64 else r.detach().float() for r in roots]
        return (*outs, *(leaf.detach() for leaf in leaves))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """One gradient of the roots, and what goes past them to the leaves, in one sum."""
        given = zip(ctx.roots, grads, strict=False)
        parts = [(root, g) for root, g in given if g is not None]
        total: list[Tensor | None] = list(grads[len(ctx.roots) :])
        keep = ctx.keep or torch._C._autograd._get_current_graph_task_keep_graph()
        if parts:
            with torch.no_grad():
                pulls, back = [g for _, g in parts], torch.ones(())
                if not ctx.precision.hooked:
                    pulls, back = normalised(pulls, ctx.precision.scale)
            with (
                uninterrupted(),
                ctx.precision.backward(),
                torch.enable_grad(),
                quiet(ctx.leaves),
            ):
                found = torch.autograd.grad(
                    [root for root, _ in parts],
                    ctx.leaves,
                    [pull.to(root.dtype) for (root, _), pull in zip(parts, pulls, strict=True)],
                    retain_graph=keep,
                    allow_unused=True,
                )
            with torch.no_grad():
                for place, g in enumerate(map(dense, found)):
                    if g is not None:
                        g = g * back.to(g.dtype)
                        known = total[place]
                        total[place] = g if known is None else known + g
        if torch.is_grad_enabled():
            total = once(total)
        return (None, None, None, None, *total)


def normalised(cotangents: Sequence[Tensor], scale: float) -> tuple[list[Tensor], Tensor]:
    """The cotangents brought to the size ``scale``, and what brings their gradients back.

    A single number becomes ``scale`` itself; else a power of two is taken out, which is exact.
    """
    size = torch.stack([g.abs().max().double() for g in cotangents]).max()
    if len(cotangents) > 1 or cotangents[0].numel() > 1:
        size = size.log2().floor().exp2()
    size = torch.where((size > 0) & size.isfinite(), size, 1.0)
    return [g.detach() * (scale / size).to(g.dtype) for g in cotangents], size / scale
