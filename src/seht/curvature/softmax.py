r"""The curvature of cross-entropy in the logits, written out.

With :math:`p = \mathrm{softmax}(z)`, a direction d in the logits of one example and its mean
:math:`m = p \cdot d` and variance :math:`v = p \cdot (d - m)^2` under p,

.. math::

    H d = p (d - m), \qquad q = d^T H d = v, \qquad
    \partial_z q = p \left((d - m)^2 - v\right) .

The general way (``output_curvature.py``) differentiates the loss three times, which costs more than
the network where the logits are many: a language model's. This form needs a handful of passes over
them, a few rows at a time, and one tensor of their size for what it returns. It is used wherever
the loss is made of cross-entropies (``cross_entropy.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seht.curvature.cross_entropy import CrossEntropy, cross_entropies
from seht.curvature.rearrangement import in_rows, out_of_rows, signed

_SAME_NUMBERS = frozenset(f"{name}Backward0" for name in ("Clone", "Alias", "ToCopy"))
"""Nodes that keep the numbers; the shape must be the same, too."""
Stretch = tuple[CrossEntropy, slice, "slice | Tensor", Tensor, list[Tensor]]


class SoftmaxCurvature:
    """The curvature of a sum of cross-entropies of rows of the outputs."""

    curved = True

    def __init__(self, outputs: list[Tensor], terms: list[CrossEntropy]) -> None:
        self._outputs, self.terms = [z.detach() for z in outputs], terms
        self._dims = {term.place: term.dim for term in terms}

    @classmethod
    def match(cls, loss: Tensor, outputs: list[Tensor]) -> SoftmaxCurvature | None:
        """The curvature, if this loss is nothing but such a sum; otherwise None."""
        terms = cross_entropies(loss, outputs)
        return cls(outputs, terms) if terms else None

    def slopes(self) -> list[Tensor]:
        """dL/dz."""
        found = self._zeros()
        for term, part, rows, p, _ in self._stretches():
            slope = torch.zeros_like(p)
            term.add_slope(slope, part, p)
            _add(found[term.place], rows, slope)
        return self._shaped(found)

    def product(self, direction: list[Tensor]) -> list[Tensor]:
        """H d."""
        found = self._zeros()
        for term, part, rows, p, [d] in self._stretches(direction):
            _add(found[term.place], rows, _moments(p, d)[0].mul_(term.share[part]))
        return self._shaped(found)

    def along(
        self, above: list[Tensor], below: list[Tensor], width: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """d^T H d along d = (above - below) / width, and its derivatives in ``above`` and in the
        outputs at a fixed d. Neither d nor anything else of the outputs' size is made besides.
        """
        found, bent, values = self._zeros(), self._zeros(), []
        for term, part, rows, p, [a, b] in self._stretches(above, below):
            own, centred, variance = _moments(p, (a - b).div_(width.to(a.dtype)))
            share = term.share[part]
            values.append((variance * share).sum())
            third = centred.mul_(own).addcmul_(p, variance, value=-1).mul_(share)
            _add(bent[term.place], rows, third)
            _add(found[term.place], rows, own.mul_(share))
        pulls = [part.mul_((2 / width).to(part.dtype)) for part in found]
        return torch.stack(values).sum(), self._shaped(pulls), self._shaped(bent)

    def _stretches(self, *others: list[Tensor]) -> Iterator[Stretch]:
        """A few rows of every term: the probabilities, and the same rows of other tensors."""
        for term in self.terms:
            given = [self._outputs, *others]
            z, *rest = [in_rows(other[term.place].detach(), term.dim) for other in given]
            for part, rows in term.stretches(z.shape[1]):
                yield term, part, rows, z[rows].softmax(1), [other[rows] for other in rest]

    def _zeros(self) -> list[Tensor]:
        return [
            z.new_zeros(z.numel() // z.shape[d], z.shape[d])
            if (d := self._dims.get(place)) is not None
            else torch.zeros_like(z)
            for place, z in enumerate(self._outputs)
        ]

    def _shaped(self, found: list[Tensor]) -> list[Tensor]:
        """Rows in the shape of the outputs."""
        return [
            out_of_rows(part, z, self._dims[place]) if place in self._dims else part
            for place, (part, z) in enumerate(zip(found, self._outputs, strict=True))
        ]


def log_softmax_dim(tensor: Tensor) -> int | None:
    """The dimension along which this was made by ``log_softmax``; None if it was not."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _SAME_NUMBERS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "LogSoftmaxBackward0":
        return None
    return signed(node._saved_dim)


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


def _moments(p: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p (d - m), d - m, and the variance."""
    centred = d - (p * d).sum(1, keepdim=True)
    own = p * centred
    return own, centred, (own * centred).sum(1, keepdim=True)


def _add(total: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows].add_(part)
    else:
        total.index_add_(0, rows, part)
