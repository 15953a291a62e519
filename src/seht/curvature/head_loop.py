r"""The Gauss-Newton trace from the head on, a few rows of logits at a time.

For cross-entropy of the logits :math:`z = h W^T` and those of a perturbed pass,
:math:`z_+ = h_+ W_+^T`, all that the Gauss-Newton trace needs of a row is in that row of the two.
So a stretch of perturbed rows is formed, turned into cotangents in place, pulled through its head,
and forgotten. z is kept from the loss's value on, one tensor for each cross-entropy, where a plain
step holds three. With one probe, what is left are the products with W that two plain steps have.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.curvature.cross_entropy import CrossEntropy, at_hand, stretches
from seht.curvature.rearrangement import in_rows, out_of_rows
from seht.curvature.unformed import Head


class HeadGradient:
    """Adds up what flows back through a head, in its hidden states, weight and bias."""

    def __init__(
        self,
        head: Head,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        states: bool | None = None,
    ) -> None:
        self._head = head
        self._rows = head.hidden.detach().flatten(0, -2)
        self.weight = head.weight.detach() if weight is None else weight
        """The head's weight at the centre, or the one given."""
        self._bias = head.bias if weight is None else bias
        states = head.hidden.requires_grad if states is None else states
        self._hidden = torch.zeros_like(self._rows) if states else None
        self._leaves = [
            (leaf, torch.zeros_like(leaf, requires_grad=False))
            for leaf in (head.weight, head.bias)
            if leaf is not None and leaf.requires_grad
        ]

    def logits(self, rows: Tensor) -> Tensor:
        """The logits of some rows."""
        return F.linear(self._rows[rows], self.weight, self._bias)

    def take(self, rows: Tensor, cotangents: Tensor) -> None:
        """Add the cotangents of the logits of these rows."""
        if self._hidden is not None:
            self._hidden.index_add_(0, rows, cotangents @ self.weight)
        for _, total in self._leaves:
            if total.dim() == 1:
                total.add_(cotangents.sum(0))
            else:
                total.addmm_(cotangents.t(), self._rows[rows])

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias with their gradients, if they require one."""
        return self._leaves

    def states(self) -> list[Tensor]:
        """The hidden states, if they require a gradient."""
        return [] if self._hidden is None else [self._head.hidden]

    def cotangents(self) -> list[Tensor]:
        """The gradients in these hidden states."""
        return [] if self._hidden is None else [self._hidden.view(self._head.hidden.shape)]


class CentreRows(Protocol):
    """The logits of the centre, stretch by stretch, and where their cotangents go. ``part`` is a
    stretch of a loss's rows, ``rows`` are its rows in the hidden states.
    """

    def logits(self, part: slice, rows: Tensor) -> Tensor:
        """The logits of some rows."""

    def room(self, part: slice, logits: Tensor) -> Tensor:
        """Memory for their cotangents, which may be that of the logits themselves."""

    def take(self, part: slice, rows: Tensor, cotangents: Tensor) -> None:
        """Add the cotangents that were written there."""


class KeptLogits:
    """All logits of the centre, which the closure has formed, and their cotangents."""

    def __init__(self, logits: Tensor, dim: int) -> None:
        self._logits, self._dim = logits.detach(), dim
        self._rows = in_rows(self._logits, dim)
        self._found = torch.zeros_like(self._rows, memory_format=torch.contiguous_format)

    def logits(self, part: slice, rows: Tensor) -> Tensor:
        """A copy of some rows."""
        return self._rows[rows]

    def room(self, part: slice, logits: Tensor) -> Tensor:
        """That copy."""
        return logits

    def take(self, part: slice, rows: Tensor, cotangents: Tensor) -> None:
        """Add the cotangents of these rows."""
        self._found.index_add_(0, rows, cotangents)

    def cotangents(self) -> Tensor:
        """The sum of the cotangents, in the shape of the logits."""
        return out_of_rows(self._found, self._logits, self._dim)


class KeptRows:
    """The logits of the rows of one loss, kept for its gradient, and the trace's cotangents."""

    def __init__(self, logits: Tensor) -> None:
        self._logits: Tensor | None = logits
        self._bend: Tensor | None = None
        self._written = 0
        """Rows of the trace's cotangents that have been written since they were forgotten."""

    def logits(self, part: slice, rows: Tensor) -> Tensor:
        """Some of the logits."""
        assert self._logits is not None
        return self._logits[part]

    def room(self, part: slice, logits: Tensor) -> Tensor:
        """Memory for the trace's cotangents of some rows: the final place if it is unused yet."""
        assert self._logits is not None
        if self._bend is None:
            self._bend, self._written = torch.empty_like(self._logits), 0
        if part.start < self._written:
            return torch.empty_like(logits)
        self._written = part.stop
        return self._bend[part]

    def take(self, part: slice, rows: Tensor, cotangents: Tensor) -> None:
        """Add the cotangents that were written into that memory."""
        assert self._bend is not None
        if cotangents.data_ptr() != self._bend[part].data_ptr():
            self._bend[part] += cotangents

    def straighten(self) -> None:
        """Forget the trace's cotangents."""
        self._bend = None

    def forget(self) -> None:
        """Free everything: no other gradient will be taken."""
        self._logits = self._bend = None

    def flow(
        self,
        rows: Tensor,
        term: CrossEntropy | None,
        bent: Tensor | None,
        into: HeadGradient,
        *,
        last: bool,
    ) -> None:
        """Give a head the cotangents of the loss, and those of the trace times ``bent``; the
        ``last`` time they are written over the logits.
        """
        assert self._logits is not None
        # Where they need no memory of their own, all at once: a product of more rows is faster.
        parts = [slice(0, len(rows))] if last else stretches(len(rows), into.weight)
        for part in parts:
            z = self._logits[part]
            found = z if last else torch.empty_like(z)
            for near, own in at_hand(part, z):
                p = None if term is None else z[near].softmax(1)
                if bent is None or self._bend is None:
                    found[near].zero_()
                else:
                    torch.mul(self._bend[own], bent.to(z.dtype), out=found[near])
                if term is not None and p is not None:
                    term.add_slope(found[near], own, p)
            into.take(rows[part], found)


class LoopedRows:
    """Kept logits whose cotangents go through the head with the probe that they belong to. After
    the ``last`` one the logits are not needed: they are written over, and go through it at once.
    """

    def __init__(self, kept: KeptRows, head: HeadGradient, *, last: bool) -> None:
        self._kept, self._head, self._last = kept, head, last

    def logits(self, part: slice, rows: Tensor) -> Tensor:
        """Some of the logits."""
        return self._kept.logits(part, rows)

    def room(self, part: slice, logits: Tensor) -> Tensor:
        """Memory of a stretch."""
        return logits if self._last else torch.empty_like(logits)

    def take(self, part: slice, rows: Tensor, cotangents: Tensor) -> None:
        """Add the cotangents of these rows, unless they can wait."""
        if not self._last:
            self._head.take(rows, cotangents)

    def close(self, term: CrossEntropy) -> None:
        """After all stretches: add what waits, in one product."""
        if self._last:
            rows = rows_of(term)
            self._head.take(rows, self._kept.logits(slice(0, len(rows)), rows))


@torch.no_grad()
def run(
    term: CrossEntropy,
    centre: CentreRows,
    above: HeadGradient,
    places: Tensor | None,
    width: Tensor,
    slope: Tensor | float,
    apart: HeadGradient | None = None,
) -> Tensor:
    """The trace along the direction from ``centre`` to ``above``; both are given their cotangents.

    ``places`` are the centre's rows in ``above``. ``slope`` times the loss's own gradient is added
    to the centre's; where its factor is not known yet it goes ``apart``.
    """
    values = []
    rows = rows_of(term)
    for part in stretches(len(rows), above.weight):
        own = rows[part]
        there = own if places is None else places[own]
        z = centre.logits(part, own)
        bent, ahead = centre.room(part, z), above.logits(there)
        loss = None if apart is None else torch.zeros_like(z)
        values += _bend(term, part, z, ahead, bent, width.to(z.dtype), slope, loss)
        above.take(there, ahead)
        centre.take(part, own, bent)
        if apart is not None and loss is not None:
            apart.take(own, loss)
    return torch.stack(values).sum()


@torch.no_grad()
def slopes(term: CrossEntropy, kept: KeptRows, centre: HeadGradient) -> None:
    """Give the centre the cotangents of the loss itself."""
    kept.flow(rows_of(term), term, None, centre, last=False)


def rows_of(term: CrossEntropy) -> Tensor:
    """The rows of the hidden states that a loss is about."""
    if term.rows is not None:
        return term.rows
    return torch.arange(len(term.share), device=term.share.device)


def _bend(
    term: CrossEntropy,
    part: slice,
    logits: Tensor,
    ahead: Tensor,
    bent: Tensor,
    width: Tensor,
    slope: Any,
    loss: Tensor | None,
) -> list[Tensor]:
    """Turn those ahead into their cotangents, as many rows as a cache holds at a time; those of
    the centre's logits go into ``bent``, which may be the logits themselves.
    """
    found = []
    for near, rows in at_hand(part, logits):
        z, d, into, share = logits[near], ahead[near], bent[near], term.share[rows]
        p = z.softmax(1)
        d.sub_(z).div_(width)
        d.sub_(torch.linalg.vecdot(p, d).unsqueeze(1))
        own = p * d
        variance = torch.linalg.vecdot(own, d).unsqueeze(1)
        found.append((variance * share).sum())
        # The derivative of the trace in z at a fixed direction, less that of the direction.
        torch.sub(d, 2 / width, out=into).mul_(own).addcmul_(p, variance, value=-1).mul_(share)
        torch.mul(own, share * (2 / width), out=d)
        if loss is not None:
            term.add_slope(loss[near], rows, p)
        elif not isinstance(slope, float) or slope != 0:
            term.add_slope(into, rows, p, slope)
    return found
