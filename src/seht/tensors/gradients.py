"""Arithmetic of whole gradients: one tensor for each leaf, None where the loss misses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Gradient = list[Tensor | None]


def dense(g: Tensor | None) -> Tensor | None:
    """A sparse gradient (``nn.Embedding(sparse=True)``) written out: sums and signs need it so."""
    return g.to_dense() if g is not None and g.layout != torch.strided else g


def inner(direction: Tensor, g: Tensor, most: int = 1 << 18) -> Tensor:
    """Their inner product, in pieces, so that int8 signs need not be widened all at once."""
    if g.numel() <= most or not g.is_contiguous():
        return torch.dot(direction.flatten().to(g.dtype), g.flatten()).double()
    pairs = zip(direction.flatten().split(most), g.flatten().split(most), strict=True)
    return torch.stack([torch.dot(s.to(part.dtype), part) for s, part in pairs]).sum().double()


def add(a: Gradient, b: Gradient) -> Gradient:
    """a + b; consumes both, so that the old parts go as the new ones come.

    Out of place: what autograd hands out may be shared between leaves, or belong to somebody else.
    """
    total: Gradient = []
    longest = max(len(a), len(b))  # a shorter list has nothing for the rest
    for parts in (a, b):
        parts.extend([None] * (longest - len(parts)))
        parts.reverse()
    while a:
        x, y = a.pop(), b.pop()
        total.append(y if x is None else x if y is None else x + y)
    return total


def times(a: Gradient, scale: Tensor | float) -> Gradient:
    """scale * a, out of place too."""
    return [None if g is None else g * scale for g in a]


def sketch(gradient: Gradient, leaves: Sequence[Tensor], most: int = 4096) -> Tensor:
    """A few thousand entries of each part, weighted so that norms are kept on average.

    The check of the step compares gradients at several steps; holding whole ones would cost the
    memory that the engine saves.
    """
    parts = []
    for leaf, g in zip(leaves, gradient, strict=False):
        stride = stride_of(leaf, most)
        taken = leaf.detach().flatten()[::stride] * 0 if g is None else g.flatten()[::stride]
        parts.append(real(taken).double() * stride**0.5)
    return torch.cat(parts)


def real(t: Tensor) -> Tensor:
    """Complex entries as twice as many real ones."""
    return torch.view_as_real(t).flatten() if t.is_complex() else t


def stride_of(leaf: Tensor, most: int = 4096) -> int:
    """How far apart the entries lie that a sketch takes."""
    return max(1, -(-leaf.numel() // most))


def left_out(parts: Gradient, trace: Tensor) -> Gradient:
    """The parts of a penalty's gradient, zero where its trace is not finite."""
    return [None if g is None else torch.where(trace.isfinite(), g, 0.0) for g in parts]
