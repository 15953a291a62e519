"""Whole gradients, one tensor for each leaf and None where the loss misses it: their arithmetic,
and how they are handed over part by part, or handed out later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


def sketch(gradient: Gradient, leaves: Sequence[Tensor]) -> Tensor:
    """A few thousand entries of each part, weighted so that norms are kept on average.

    The check of the step compares gradients at several steps; holding whole ones would cost the
    memory that the engine saves.
    """
    parts = []
    for leaf, g in zip(leaves, gradient, strict=False):
        stride = stride_of(leaf)
        taken = leaf.detach().flatten()[::stride] * 0 if g is None else g.flatten()[::stride]
        parts.append(real(taken).double() * stride**0.5)
    return torch.cat(parts)


def real(t: Tensor) -> Tensor:
    """Complex entries as twice as many real ones."""
    return torch.view_as_real(t).flatten() if t.is_complex() else t


def stride_of(leaf: Tensor) -> int:
    """How far apart the entries lie that a sketch takes."""
    return max(1, -(-leaf.numel() // 4096))


def left_out(parts: Gradient, trace: Tensor) -> Gradient:
    """The parts of a penalty's gradient, zero where its trace is not finite."""
    return [None if g is None else torch.where(trace.isfinite(), g, 0.0) for g in parts]


# --- handed over as they come, and handed out when they are wanted --------------------------------

Take = Callable[[int, Tensor], None]
_LARGE = 1 << 16  # numbers; for less, a call into Python costs more than the memory is worth


@contextmanager
def handing_over(targets: Sequence[Tensor], take: Take) -> Iterator[set[int]]:
    """Give ``take`` the gradient of each large target as soon as a backward pass has it.

    What the pass then returns in its place needs no memory, so that a whole gradient is never
    held. Yields the places that were taken.
    """
    taken: set[int] = set()

    def hook(place: int) -> Callable[[Tensor], Tensor | None]:
        def hand_over(gradient: Tensor) -> Tensor | None:
            if type(gradient) is not Tensor or gradient.layout != torch.strided:
                return None  # sparse and foreign ones are returned as usual
            with torch.no_grad():
                take(place, gradient)
            taken.add(place)
            return gradient.new_zeros(()).expand_as(gradient)

        return hand_over

    hooks = [
        target.register_hook(hook(place))
        for place, target in enumerate(targets)
        if target.numel() >= _LARGE
    ]
    try:
        yield taken
    finally:
        for handle in hooks:
            handle.remove()


class Stored(torch.autograd.Function):
    """A value whose gradient is known already: handed out when the user differentiates it.

    ``inputs[i]`` receives ``scales[i] * gradients[i]`` (``gradients[i]`` may be the number 1), or
    nothing where that is ``None``.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: list[Any], scales: list[float], *inputs: Tensor
    ) -> Tensor:
        """The value itself."""
        ctx.gradients, ctx.scales = gradients, scales
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The stored gradients, times what comes from above."""
        scaled: dict[tuple[int, torch.dtype], Tensor] = {}  # most scales are one number
        parts: list[Tensor | None] = []
        with torch.no_grad():
            for g, s in zip(ctx.gradients, ctx.scales, strict=True):
                if not isinstance(g, Tensor):
                    parts.append(None if g is None else grad * s)
                    continue
                factor = scaled.get((id(s), g.dtype))
                if factor is None:
                    factor = scaled[id(s), g.dtype] = (grad * s).to(g.dtype)
                parts.append(g * factor)
        if torch.is_grad_enabled():  # with create_graph=True: an error for who goes on
            parts = once(parts)
        return (None, None, None, *parts)


class Reached(torch.autograd.Function):
    """Stands for a graph with these leaves, and leaves them without a gradient."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        """Some tensor, whose value is not used."""
        ctx.count = len(leaves)
        return leaves[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Nothing."""
        return (None,) * ctx.count


def once(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients that raise where they are differentiated again.

    PyTorch's ``once_differentiable`` does so only where the gradient from above has a graph; a
    plain ``backward(create_graph=True)`` would silently get the derivative of the centre's part.
    """
    given = [g.detach().requires_grad_() for g in gradients if g is not None]
    raising = torch._C._functions.DelayedError(
        "this result cannot be differentiated twice: its gradient is a difference of ordinary "
        "gradients; use engine='autograd', whose results have all derivatives",
        len(given),
    )
    out = raising(*given)
    rest = iter((out,) if isinstance(out, Tensor) else out)
    return [None if g is None else next(rest) for g in gradients]


def handed_out(
    value: Tensor, gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> Tensor:
    """A scalar with this value and these gradients, without a graph behind it."""
    result: Tensor = Stored.apply(value, list(gradients), [1.0] * len(leaves), *leaves)
    return result
