r"""The loss's own curvature in the outputs: exact, by a double backward through the loss alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seht.engines.graph import leaves_of, quiet


@dataclass
class OutputCurvature:
    r"""For a direction d in the outputs: :math:`q = d^T H_{out} d` and its two derivatives."""

    value: Tensor
    product: list[Tensor]
    """:math:`H_{out} d`; the derivative of q in d is twice that."""
    third: list[Tensor]
    """The derivative of q in the outputs, d held fixed."""
    beyond: list[tuple[Tensor, Tensor]]
    """Leaves of the loss itself (a second module behind the outputs), with q's derivative."""


def slope(loss: Tensor, outputs: list[Tensor]) -> tuple[list[Tensor | None], bool]:
    """dL/dz with its graph, and whether it depends on z at all."""
    parts: list[Tensor | None] = list(
        torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    )
    return parts, any(p is not None and p.requires_grad for p in parts)


def curve(
    gradient: list[Tensor | None], outputs: list[Tensor], direction: list[Tensor]
) -> OutputCurvature:
    """Differentiate dL/dz twice more along d."""
    pairs = [
        (g * d).sum()
        for g, d in zip(gradient, direction, strict=True)
        if g is not None and g.requires_grad
    ]
    first = torch.stack(pairs).sum()
    product = _grad(first, outputs, graph=True)
    value = torch.stack([(h * d).sum() for h, d in zip(product, direction, strict=True)]).sum()
    third = [torch.zeros_like(z) for z in outputs]
    beyond: list[tuple[Tensor, Tensor]] = []
    if value.requires_grad:
        third = _grad(value, outputs, graph=False)
        beyond = _beyond(value, outputs)
    return OutputCurvature(value.detach(), [h.detach() for h in product], third, beyond)


def _beyond(value: Tensor, outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The derivative in leaves that the loss reaches without passing the outputs."""
    leaves, _ = leaves_of([value], 0, stop=outputs)
    leaves = [leaf for leaf in leaves if not any(leaf is z for z in outputs)]
    if not leaves:
        return []
    # A leaf may also lie before the outputs (a tied weight): nothing may flow through them.
    blocks = [z.register_hook(torch.zeros_like) for z in outputs]
    try:
        with quiet(leaves):
            parts = torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)
    finally:
        for block in blocks:
            block.remove()
    return list(zip(leaves, parts, strict=True))


def _grad(value: Tensor, outputs: list[Tensor], *, graph: bool) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            value, outputs, create_graph=graph, retain_graph=True, materialize_grads=True
        )
    )
