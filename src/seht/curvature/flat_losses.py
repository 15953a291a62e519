"""Losses without curvature in the outputs, and losses that cannot be differentiated twice.

For an absolute value, a hinge, or ``F.nll_loss`` of log-probabilities the Gauss-Newton trace is 0
on every batch: a penalty that does nothing. That the gradient :math:`dL/dz` still has a graph says
little, as PyTorch writes zeros into graphs, too (the derivative of a sign, of a ReLU's decision).
So the first step looks. It refuses where nothing but such zeros leads back to z in that graph.
Where something else does, and the curvature is 0 all the same, it is so on this batch (saturated,
or far out on a Huber loss), and it warns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seht.errors import warn
from seht.tensors.graph import node_of, parents, walk
from seht.tensors.second_derivatives import is_real_sign

_STEPS = frozenset(f"{name}Backward0" for name in ("Sign", "Floor", "Ceil", "Round", "Trunc"))
"""Backward nodes of functions whose derivative is 0."""
_PIECES = frozenset(
    f"{name}BackwardBackward0"
    for name in (
        *("Threshold", "LeakyRelu", "Hardtanh", "Hardshrink", "Softshrink", "RreluWithNoise"),
        *("NllLoss", "NllLoss2D", "MaxPool2DWithIndices", "MaxPool3DWithIndices"),
        *("AdaptiveMaxPool2D", "AdaptiveMaxPool3D"),
    )
)
"""Backward functions (of a gradient and an input) that decide by the input, and no more."""
_WAYS = (
    'take curvature="hessian" (0 as well where the network is piecewise linear, as with ReLU), or '
    "say which tensor holds the logits: name the module that puts it out with "
    'boundary="module.name", or mark it in the closure with seht.boundary(logits)'
)


class NotTwice(RuntimeError):
    """An operator of the loss has no second derivative."""


class NoCurvature(RuntimeError):
    """The loss has no curvature in the outputs, on any batch."""


def linear() -> NoCurvature:
    """The loss's gradient does not depend on the outputs at all."""
    return NoCurvature(
        'curvature="ggn": the loss is linear in the model\'s outputs (does the model return its '
        "own loss, or log-probabilities? is it a hinge, or a critic's mean?), which would give a "
        f"trace of 0; {_WAYS}"
    )


@contextmanager
def twice() -> Iterator[None]:
    """Around the second derivative of a loss: says what to do if the loss has only a first one."""
    try:
        yield
    except NotTwice:
        raise
    except RuntimeError as error:
        if "double backward" in str(error) or "not implemented" in str(error):
            raise NotTwice(
                'curvature="ggn" differentiates the loss more than once, and an operator in it '
                f"cannot be ({error}); take curvature=\"hessian\" with engine='difference', which "
                "needs first derivatives only"
            ) from error
        if "must be contiguous" in str(error):  # nll_loss2d, in its third derivative
            raise RuntimeError(
                "PyTorch cannot differentiate this cross-entropy of logits with the classes in the "
                f"second dimension so often ({error}); give it rows: "
                "F.cross_entropy(logits.movedim(1, -1).flatten(0, -2), labels.flatten())"
            ) from error
        raise


def make_of(loss: Tensor, outputs: Sequence[Tensor]) -> frozenset[str]:
    """The kinds of graph nodes between outputs and loss, by which a known loss is recognised."""
    ends = {node_of(z) for z in outputs}
    return frozenset(node.name() for node in set(walk([loss.grad_fn], ends)) - ends)


def look(gradient: Sequence[Tensor | None], outputs: list[Tensor]) -> None:
    """Refuse dL/dz that is constant between kinks; warn where its derivative is 0 on this batch.

    The one place that looks at numbers on the host: for the first step with such a loss.
    """
    bent = [g for g in gradient if g is not None and g.requires_grad]
    ends = {node_of(z) for z in outputs}
    alive = any(node in ends for node in walk([g.grad_fn for g in bent], ends, _behind))
    with twice():
        found = torch.autograd.grad(
            bent, outputs, [_generic(g) for g in bent], retain_graph=True, allow_unused=True
        )
    product = [h for h in found if h is not None]
    if not alive or not product:
        raise NoCurvature(
            'curvature="ggn": the loss has no curvature in the model\'s outputs (an absolute value '
            "or a hinge has none, nor has F.nll_loss in log-probabilities), so that the trace "
            f"would be 0 on every step; {_WAYS}"
        )
    if not any(bool(h.any()) for h in product):
        warn(
            'seht: curvature="ggn": the loss has no curvature in the model\'s outputs on this '
            "batch (saturated, or each error in the straight part of a Huber or hinge loss), so "
            'that the trace is 0; where that lasts, take curvature="hessian".'
        )


def _behind(node: Any) -> list[Any]:
    """The nodes that something other than 0 may flow to: past no derivative that is always 0."""
    name = node.name()
    if name in _STEPS or (name == "PowBackward0" and node._saved_exponent == 0):
        return []
    if is_real_sign(node):
        return []
    return parents(node)[:1] if name in _PIECES else parents(node)


def _generic(like: Tensor) -> Tensor:
    """A direction that no structure of the loss is likely to be orthogonal to."""
    places = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return (places * 0.7548777 + 1).cos().view(like.shape).to(like.dtype)
