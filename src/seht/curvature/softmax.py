r"""The curvature of cross-entropy in the logits, written out.

With :math:`p = \mathrm{softmax}(z)`, a direction d in the logits of one example and its mean
:math:`m = p \cdot d` and variance :math:`v = p \cdot (d - m)^2` under p,

.. math::

    H d = p (d - m), \qquad q = d^T H d = v, \qquad
    \partial_z q = p \left((d - m)^2 - v\right) .

The general way (``curved.py``) differentiates the loss three times, which costs more than the
network where the logits are many: a language model's. This form needs a handful of passes over
them, a few rows at a time, which the processor keeps at hand meanwhile. It is used where the graph
between loss and logits is exactly that of ``F.cross_entropy``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SAME_ORDER = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Clone", "Alias")
)
"""What ``reshape`` leaves in the graph: the same numbers in the same order."""
_SAME_NUMBERS = frozenset(("CloneBackward0", "AliasBackward0", "ToCopyBackward0"))
"""Of the same shape, besides."""
_MEAN, _SUM = 1, 2
_AT_HAND = 1 << 18
"""Logits of one stretch of rows: a megabyte, which a cache holds."""


class SoftmaxCurvature:
    """Of the mean (or summed) cross-entropy of logits that are one of the outputs."""

    curved = True

    def __init__(self, outputs: list[Tensor], place: int, nll: Any, log_softmax: Any) -> None:
        self._outputs, self._place = outputs, place
        self._log_p = log_softmax._saved_result.detach()
        target = nll._saved_target.unsqueeze(1)
        kept = target != _signed(nll._saved_ignore_index)
        self._target = target.where(kept, 0)  # what is ignored need not be a class
        self._share = kept.to(self._log_p.dtype)
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
        return self._spread(
            self._log_p.exp().scatter_add_(1, self._target, -ones).mul_(self._share)
        )

    def product(self, direction: list[Tensor]) -> list[Tensor]:
        """H d."""
        found = torch.empty_like(self._log_p)
        for rows in self._stretches():
            p, d, share = self._taken(rows, direction)
            torch.mul(p, d - _rows(p, d), out=found[rows]).mul_(share)
        return self._spread(found)

    def along(self, direction: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """d^T H d, H d, and the derivative of the first in the outputs."""
        product, third = torch.empty_like(self._log_p), torch.empty_like(self._log_p)
        values = []
        for rows in self._stretches():
            p, d, share = self._taken(rows, direction)
            centred = d - _rows(p, d)
            own = torch.mul(p, centred, out=product[rows])
            variance = _rows(own, centred)
            values.append((variance * share).sum())
            torch.mul(centred, own, out=third[rows]).addcmul_(p, variance, value=-1).mul_(share)
            own.mul_(share)
        value = torch.stack(values).sum() if values else self._share.sum()
        return value, self._spread(product), self._spread(third)

    def _stretches(self) -> Iterator[slice]:
        """Rows that fit into a cache; all of them where there is none to be kind to."""
        count, width = self._log_p.shape
        step = max(1, _AT_HAND // max(1, width)) if self._log_p.device.type == "cpu" else count
        for start in range(0, count, max(1, step)):
            yield slice(start, start + step)

    def _taken(self, rows: slice, direction: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        d = direction[self._place].reshape(self._log_p.shape)
        return self._log_p[rows].exp(), d[rows], self._share[rows]

    def _spread(self, part: Tensor) -> list[Tensor]:
        parts = [torch.zeros_like(z) for z in self._outputs if z is not self._outputs[self._place]]
        parts.insert(self._place, part.reshape(self._outputs[self._place].shape))
        return parts


def log_softmax_dim(tensor: Tensor) -> int | None:
    """The dimension along which this was made by ``log_softmax``; None if it was not."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _SAME_NUMBERS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "LogSoftmaxBackward0":
        return None
    return _signed(node._saved_dim)


def again(log_p: Tensor, dim: int) -> Tensor:
    r"""Log-probabilities as a function of themselves, taken for logits.

    ``log_softmax`` of log-probabilities gives them back, so that they are logits too: those of the
    network less a constant c in each row, on which no loss behind ``log_softmax`` depends. With
    :math:`P = I - 1 p^T`, the derivative of ``log_softmax``, and :math:`H 1 = 0`, the curvature
    along a direction Pd in them is that along d in the network's own logits, :math:`d^T H d`.
    """
    given = torch.log_softmax(log_p, dim)
    given.data.copy_(log_p)  # the same but for rounding: let it be the same
    return given


def _signed(number: int) -> int:
    """Nodes show their numbers as unsigned ones."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _is_edge_of(z: Tensor, node: Any, port: int) -> bool:
    if z.grad_fn is None:
        return getattr(node, "variable", None) is z
    return z.grad_fn is node and z.output_nr == port


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of the rows, as a column."""
    return (a * b).sum(1, keepdim=True)
