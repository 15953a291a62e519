r"""Repeat a forward pass at other weights with every decision as it was.

The Hessian of a ReLU network ignores the kinks, a finite step crosses them, and a difference
quotient over a kink is off by (jump) / step^2. So the first pass over a tape records and the later
ones replay

- the piece of every piecewise linear function: y = a x + b with a, b from the first pass;
- the position of every maximum in a pooling window;
- results that are no floating numbers (comparisons, argmax, ``bool(x)``, ``x.item()``);
- what autograd holds constant: ``detach``, ``.data``, everything under ``no_grad``, the row of an
  embedding's ``padding_idx``.

Nothing else is touched: every other operation runs as the model calls it, on results that lie in
memory as they would. Kinks that are not in these tables stay free; :mod:`seht.check.truth`
notices them, since its steps then disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PIECEWISE_LINEAR: frozenset[Any] = frozenset(
    [
        *(F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6),
        *(F.leaky_relu, F.leaky_relu_, F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_),
        *(F.hardtanh, F.hardtanh_, F.hardsigmoid, F.threshold, torch.threshold),
        *(F.hardshrink, Tensor.hardshrink, F.softshrink),
        *(torch.clamp, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip, Tensor.clip_),
        *(torch.clamp_min, Tensor.clamp_min, Tensor.clamp_min_),
        *(torch.clamp_max, Tensor.clamp_max, Tensor.clamp_max_),
        *(torch.abs, Tensor.abs, Tensor.abs_, Tensor.__abs__, torch.absolute, Tensor.absolute),
        *(torch.round, Tensor.round, torch.floor, Tensor.floor, torch.ceil, Tensor.ceil),
        *(torch.trunc, Tensor.trunc, torch.sign, Tensor.sign, torch.sgn, Tensor.sgn),
    ]
)

POOLS: dict[Any, tuple[Callable[..., Any], int]] = {
    F.max_pool1d: (F.max_pool1d_with_indices, 1),
    F.max_pool2d: (F.max_pool2d_with_indices, 2),
    F.max_pool3d: (F.max_pool3d_with_indices, 3),
    F.adaptive_max_pool1d: (F.adaptive_max_pool1d_with_indices, 1),
    F.adaptive_max_pool2d: (F.adaptive_max_pool2d_with_indices, 2),
    F.adaptive_max_pool3d: (F.adaptive_max_pool3d_with_indices, 3),
}
"""Pooling to (the form that also returns positions, number of pooled axes)."""

CONSTANT: frozenset[Any] = frozenset(
    [torch.detach, Tensor.detach, Tensor.detach_, Tensor.data.__get__]  # type: ignore[attr-defined]
)
HOST: frozenset[Any] = frozenset(
    [
        *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__),
        *(Tensor.__index__, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
        *(torch.is_nonzero, Tensor.is_nonzero),
    ]
)


class NotRepeatable(RuntimeError):
    """The forward pass does other operations when it is run again."""


class Tape(TorchFunctionMode):
    """Records in the first ``with`` block, replays in every later one."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[Any, Any]] = []
        self._place = 0
        self._recording = True
        self._passes = 0
        self._constant = False

    def __enter__(self) -> Tape:
        self._recording, self._place, self._constant = self._passes == 0, 0, False
        self._passes += 1
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self._place != len(self._entries):
            raise NotRepeatable("a second forward pass makes fewer decisions than the first")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sort the call into one of the four kinds above; everything else passes."""
        kwargs = kwargs or {}
        # The user's no_grad; custom Functions do not call it.
        if func is torch._C._set_grad_enabled:
            self._constant = not args[0]
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            if func in PIECEWISE_LINEAR and _only_input(args, kwargs):
                return self._linear(func, args, kwargs)
            if func in POOLS and _only_input(args, kwargs):
                return self._pool(func, args, kwargs)
            if func is F.embedding:
                return self._embedding(*args, **kwargs)
        out = func(*args, **kwargs)
        # Inside a custom Function gradients are off too, and nothing there is held constant.
        constant = self._constant or (func in CONSTANT and torch.is_grad_enabled())
        if constant or func in HOST or _is_decision(out, args):
            return self._same(func, out, (*args, *kwargs.values()))
        return out

    def _keep(self, func: Any, make: Callable[[], Any]) -> Any:
        if self._recording:
            self._entries.append((func, make()))
        elif self._place >= len(self._entries) or self._entries[self._place][0] != func:
            raise NotRepeatable("a second forward pass takes other decisions than the first")
        self._place += 1
        return self._entries[self._place - 1][1]

    def _linear(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        x = args[0]

        def piece() -> tuple[Tensor, Tensor, bool, tuple[int, ...]]:
            centre = x.detach().requires_grad_()
            copied = centre.clone()  # some of these functions write into their input
            y = func(copied, *args[1:], **kwargs)
            if not y.requires_grad:
                slope = torch.zeros_like(centre)
            else:
                (slope,) = torch.autograd.grad(y, centre, torch.ones_like(y))
            return slope, y.detach() - slope * x.detach(), y is copied, y.stride()

        slope, offset, in_place, strides = self._keep(func, piece)
        y = slope * x + offset
        return x.copy_(y) if in_place else _strided(y, strides)

    def _pool(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        x, (with_indices, axes) = args[0], POOLS[func]
        kwargs = {name: value for name, value in kwargs.items() if name != "return_indices"}
        out, at = self._keep(func, lambda: with_indices(x.detach(), *args[1:], **kwargs))
        y = x.flatten(-axes).gather(-1, at.flatten(-axes)).view(at.shape)
        return _strided(y, out.stride())

    def _embedding(
        self, at: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        out = F.embedding(at, weight, padding_idx, *args, **kwargs)
        if padding_idx is None:
            return out
        row = self._keep(F.embedding, lambda: weight[padding_idx].detach().clone())
        return torch.where((at == padding_idx % len(weight)).unsqueeze(-1), row, out)

    def _same(self, func: Any, out: Any, inputs: tuple[Any, ...]) -> Any:
        if isinstance(out, tuple) and any(isinstance(part, Tensor) for part in out):
            parts = [self._same(func, p, ()) if isinstance(p, Tensor) else p for p in out]
            return type(out)(parts)
        if not isinstance(out, Tensor):
            return self._keep(func, lambda: out) if func in HOST else out
        kept = self._keep(func, lambda: out.detach().clone())
        if torch.equal(out, kept):
            return out  # itself, since the model may go on to write through it
        if any(out is value for value in inputs):
            with torch.no_grad():
                return out.copy_(kept)
        return kept.clone()


def _strided(y: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Laid out in memory as the function itself does: dropout draws its mask in that order."""
    if y.stride() == strides:
        return y
    return torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)


def _only_input(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call is a function of its first argument alone, which depends on weights.

    Of real numbers: the absolute value and the sign of complex ones are curved.
    """
    if not args or not isinstance(args[0], Tensor) or not args[0].requires_grad:
        return False
    if args[0].is_complex():
        return False
    return not any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))


def _is_decision(out: Any, args: Any) -> bool:
    """Whether whole numbers or truth values were made from floating numbers."""
    if not isinstance(out, Tensor) or out.is_floating_point() or out.is_complex():
        return False
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in args)
