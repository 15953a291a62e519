"""Operators whose derivatives are silently wrong from some order on, searched for in a graph.

While a closure runs in a mode of :mod:`seht.operators.safe_forms` such operators are replaced where
Python calls them. Some calls no mode sees: C++ code, scripted functions, graphs that were made
before the closure. They leave nodes of a known name, and a reference that may be wrong is refused.

The difference engine replaces nothing and meets such nodes in two places: where it differentiates
the loss's own curvature behind the network's outputs, and where the closure itself takes gradients
of gradients, so that even the plain training has a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from seht.tensors.graph import between

WRONG: dict[str, tuple[int, str]] = {
    "NativeBatchNormBackward": (3, "batch norm"),
    "NativeBatchNormLegitBackward": (3, "batch norm"),
    "BatchNormWithUpdateBackward": (3, "batch norm"),
    "CudnnBatchNormBackward": (3, "batch norm"),
    "MiopenBatchNormBackward": (3, "batch norm"),
    "NativeLayerNormBackward": (3, "layer norm"),
    "NativeBatchNormBackwardBackward": (2, "the gradient of batch norm"),
    "BatchNormBackwardBackward": (2, "the gradient of batch norm"),
    "CudnnBatchNormBackwardBackward": (2, "the gradient of batch norm"),
    "MiopenBatchNormBackwardBackward": (2, "the gradient of batch norm"),
    "NativeLayerNormBackwardBackward": (2, "the gradient of layer norm"),
    "WeightNormInterfaceBackward": (2, "weight norm"),
    "LogcumsumexpBackward": (3, "logcumsumexp"),
    "torch::jit::(anonymous namespace)::DifferentiableGraphBackward": (3, "a scripted function"),
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": (
        2,
        "linear_cross_entropy in chunks",
    ),
}
"""By the name of a node: the first order at which its derivative is wrong, and what it stands for.
Measured against differences of lower orders with torch 2.13.
"""


UNSEEN = (
    "was computed where it could not be replaced, by C++ or scripted code or before the closure, "
    "and"
)
"""Why the reference meets such an operator at all."""


def refuse_wrong(
    roots: Sequence[Tensor], towards: Sequence[Tensor], order: int, fix: str, why: str = UNSEEN
) -> None:
    """Raise if an operator between the roots and the tensors ``towards`` is wrong at this order.

    A node that none of ``towards`` reaches is differentiated once only, whatever the order.
    """

    def known(node: Any) -> tuple[int, str]:
        return WRONG.get(node.name().rstrip("0123456789"), (order + 1, ""))

    def wrong(node: Any) -> bool:  # with running statistics a batch norm is a product
        return known(node)[0] <= order and getattr(node, "_saved_training", True)

    for node in between(roots, towards, wrong):
        nth = {2: "second", 3: "third"}[order]
        raise RuntimeError(
            f"{known(node)[1]} ({node.name()}) {why} has no double backward that is right: its "
            f"{nth} derivative would silently be wrong; {fix}"
        )
