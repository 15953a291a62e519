r"""The loss's own curvature in the outputs: exact, by a double backward through the loss alone.

Cross-entropy, whose curvature is known, has a shorter way: ``softmax.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seht.curvature.cross_entropy import CrossEntropy
from seht.curvature.flat_losses import look, make_of, twice
from seht.curvature.softmax import SoftmaxCurvature
from seht.operators.orders import refuse_wrong
from seht.tensors.graph import leaves_of, quiet
from seht.tensors.second_derivatives import refuse_once, solid

_BEHIND = (
    "use engine='autograd', which replaces it, or name a module behind it with boundary=",
    "lies between the network's outputs and the loss, and",
)


@dataclass
class OutputCurvature:
    r"""For a direction d in the outputs, the difference of two passes' by their distance:
    :math:`q = d^T H_{out} d` and its derivatives.
    """

    value: Tensor
    pulls: list[Tensor]
    """The derivative of q in the outputs of the first: :math:`2 H_{out} d` by the distance."""
    third: list[Tensor]
    """The derivative of q in the outputs at the centre, d held fixed."""
    beyond: list[tuple[Tensor, Tensor]]
    """Leaves of the loss itself (a second module behind the outputs), with q's derivative."""


def slope(loss: Tensor, outputs: list[Tensor]) -> tuple[list[Tensor | None], bool]:
    """dL/dz with its graph, and whether it depends on z at all."""
    refuse_once(
        [loss],
        outputs,
        'curvature="ggn" differentiates the loss twice: take curvature="hessian", or compute its '
        "backward with differentiable operations and drop the mark",
    )
    parts: list[Tensor | None] = list(
        torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    )
    solid(parts)
    return parts, any(p is not None and p.requires_grad for p in parts)


class Curvature:
    """The loss's curvature in the outputs, at the centre; taken along several directions."""

    def __init__(self, loss: Tensor, outputs: list[Tensor]) -> None:
        self._outputs = outputs
        self._gradient: list[Tensor | None] = []
        self._softmax = SoftmaxCurvature.match(loss, outputs)
        if self._softmax is not None:
            self.curved = True
        else:
            self._gradient, self.curved = slope(loss, outputs) if outputs else ([], False)

    @property
    def cross_entropies(self) -> list[CrossEntropy]:
        """What the loss is made of, if that is nothing else."""
        return [] if self._softmax is None else self._softmax.terms

    def look(self, loss: Tensor, looked: set[frozenset[str]], *, third: bool) -> None:
        """Refuse a loss that has no curvature in its outputs, ever, and one whose derivatives are
        wrong in PyTorch; the ``third`` is part of the trace's gradient. ``looked`` are the makes of
        loss that were found to be in order.
        """
        if self._softmax is not None:
            return
        make = make_of(loss, self._outputs)
        if make not in looked:
            look(self._gradient, self._outputs)
            refuse_wrong([loss], self._outputs, 3 if third else 2, *_BEHIND)
            looked.add(make)

    def slopes(self) -> list[Tensor]:
        """dL/dz, without a graph."""
        if self._softmax is not None:
            return self._softmax.slopes()
        return [
            torch.zeros_like(z) if g is None else g.detach()
            for z, g in zip(self._outputs, self._gradient, strict=True)
        ]

    def direction(
        self, above: Sequence[Tensor], below: Sequence[Tensor], width: Tensor
    ) -> list[Tensor]:
        """The outputs' derivative, from those of two passes; 0 for a class that the model rules out
        with a logit of minus infinity.
        """
        found = []
        for a, b in zip(above, below, strict=True):
            d = (a.detach() - b.detach()).div_(width.to(a.dtype))
            if self._softmax is None:  # where it matches, all logits are finite
                d.masked_fill_(b.detach().isinf(), 0.0)
            found.append(d)
        return found

    def along(self, above: list[Tensor], below: list[Tensor], width: Tensor) -> OutputCurvature:
        """Differentiate dL/dz twice more along the outputs' derivative."""
        if self._softmax is not None:
            return OutputCurvature(*self._softmax.along(above, below, width), [])
        direction = self.direction(above, below, width)
        product = bent_along(self._gradient, self._outputs, direction, graph=True)
        value = torch.stack(
            [(h.detach() * d).sum() for h, d in zip(product, direction, strict=True)]
        ).sum()
        third = [torch.zeros_like(z) for z in self._outputs]
        beyond: list[tuple[Tensor, Tensor]] = []
        bent = [(h, d) for h, d in zip(product, direction, strict=True) if h.requires_grad]
        if bent:
            solid(product)
            products, along = map(list, zip(*bent, strict=True))
            third = _grad(products, self._outputs, along, graph=False)
            beyond = _beyond(products, along, self._outputs)
        pulls = [h.detach() * (2 / width).to(h.dtype) for h in product]
        return OutputCurvature(value, pulls, third, beyond)

    def product(self, direction: list[Tensor]) -> list[Tensor]:
        """H d alone."""
        if self._softmax is not None:
            return self._softmax.product(direction)
        return bent_along(self._gradient, self._outputs, direction, graph=False)


def bent_along(
    gradient: Sequence[Tensor | None],
    outputs: list[Tensor],
    direction: Sequence[Tensor],
    *,
    graph: bool,
) -> list[Tensor]:
    """:math:`H_{out} d`, from dL/dz with its graph."""
    pairs = [
        (g, d)
        for g, d in zip(gradient, direction, strict=True)
        if g is not None and g.requires_grad
    ]
    slopes, along = map(list, zip(*pairs, strict=True))
    return _grad(slopes, outputs, along, graph=graph)


def _beyond(
    products: list[Tensor], along: list[Tensor], outputs: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The derivative in leaves that the loss reaches without passing the outputs."""
    leaves = leaves_of(products, stop=outputs)
    leaves = [leaf for leaf in leaves if not any(leaf is z for z in outputs)]
    if not leaves:
        return []
    # A leaf may also lie before the outputs (a tied weight): nothing may flow through them.
    blocks = [z.register_hook(torch.zeros_like) for z in outputs]
    try:
        with quiet(leaves):
            parts = _grad(products, leaves, along, graph=False)
    finally:
        for block in blocks:
            block.remove()
    return list(zip(leaves, parts, strict=True))


def _grad(
    values: list[Tensor], inputs: list[Tensor], along: list[Tensor], *, graph: bool
) -> list[Tensor]:
    with twice():
        return list(
            torch.autograd.grad(
                values, inputs, along, create_graph=graph, retain_graph=True, materialize_grads=True
            )
        )
