r"""The curvature of cross-entropy in the logits, written out.

With :math:`p = \mathrm{softmax}(z)`, a direction d in the logits of one example and its mean
:math:`m = p \cdot d` and variance :math:`v = p \cdot (d - m)^2` under p,

.. math::

    H d = p (d - m), \qquad q = d^T H d = v, \qquad
    \partial_z q = p \left((d - m)^2 - v\right) .

The general way (``curved.py``) differentiates the loss three times, which costs more than the
network where the logits are many: a language model's. This form needs a handful of passes over
them. It is used where the graph between loss and logits is exactly that of ``F.cross_entropy``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SAME_ORDER = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Clone", "Alias")
)
"""What ``reshape`` leaves in the graph: the same numbers in the same order."""
_MEAN, _SUM = 1, 2


class SoftmaxCurvature:
    """Of the mean (or summed) cross-entropy of logits that are one of the outputs."""

    curved = True

    def __init__(self, outputs: list[Tensor], place: int, nll: Any, log_softmax: Any) -> None:
        self._outputs, self._place = outputs, place
        self._p = log_softmax._saved_result.detach().exp()
        target = nll._saved_target.unsqueeze(1)
        kept = target != _signed(nll._saved_ignore_index)
        self._target = target.where(kept, 0)  # what is ignored need not be a class
        self._share = kept.to(self._p.dtype)
        if nll._saved_reduction == _MEAN:
            self._share = self._share / nll._saved_total_weight

    @classmethod
    def match(cls, loss: Tensor, outputs: list[Tensor]) -> SoftmaxCurvature | None:
        """If this loss is nothing but such a cross-entropy."""
        nll: Any = loss.grad_fn
        node: Any
        if nll is None or nll.name() != "NllLossBackward0":
            return None
        if nll._saved_reduction not in (_MEAN, _SUM) or nll._saved_weight is not None:
            return None
        node, port = nll.next_functions[0]
        if (
            node is None
            or node.name() != "LogSoftmaxBackward0"
            or _signed(node._saved_dim) not in (1, -1)
        ):
            return None
        log_softmax = node
        while True:
            node, port = node.next_functions[0]
            for place, z in enumerate(outputs):
                if _is_edge_of(z, node, port):
                    one = z.dtype == log_softmax._saved_result.dtype
                    return cls(outputs, place, nll, log_softmax) if one else None
            if node is None or node.name() not in _SAME_ORDER:
                return None

    def slopes(self) -> list[Tensor]:
        """dL/dz."""
        ones = torch.ones_like(self._share)
        return self._spread(self._p.scatter_add(1, self._target, -ones).mul_(self._share))

    def product(self, direction: list[Tensor]) -> list[Tensor]:
        """H d."""
        d = direction[self._place].reshape(self._p.shape)
        return self._spread((d - _rows(self._p, d)).mul_(self._p).mul_(self._share))

    def along(self, direction: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """d^T H d, H d, and the derivative of the first in the outputs."""
        p = self._p
        d = direction[self._place].reshape(p.shape)
        centred = d - _rows(p, d)
        product = p * centred
        variance = _rows(product, centred)
        value = (variance * self._share).sum()
        third = centred.mul_(product).addcmul_(p, variance, value=-1)
        return (
            value,
            self._spread(product.mul_(self._share)),
            self._spread(third.mul_(self._share)),
        )

    def _spread(self, part: Tensor) -> list[Tensor]:
        parts = [torch.zeros_like(z) for z in self._outputs if z is not self._outputs[self._place]]
        parts.insert(self._place, part.reshape(self._outputs[self._place].shape))
        return parts


def _signed(number: int) -> int:
    """Nodes show their numbers as unsigned ones."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _is_edge_of(z: Tensor, node: Any, port: int) -> bool:
    if z.grad_fn is None:
        return getattr(node, "variable", None) is z
    return z.grad_fn is node and z.output_nr == port


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of the rows, as a column, without a product of the size of the rows."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).squeeze(2)
