"""Unformed logits: the result of a large linear map that is not computed until it is needed.

A language model's logits are its largest tensors by far, and cross-entropy needs only a few rows of
them at a time. In passes where it pays, a large ``F.linear`` therefore returns a tensor without
content, which knows what it would be computed from (:class:`Head`) and where its rows are after it
was sliced, shifted, flattened or masked. ``F.cross_entropy`` works with it directly
(``head_rules.py``). Any other use computes the logits, with the graph they would have had, and is
noted: the estimate then starts again with logits that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.curvature.rearrangement import Rows, follow
from seht.operators.operator import METADATA
from seht.operators.rules import called
from seht.operators.table import MOVEMENT, PICKS
from seht.tensors.memory import version
from seht.tensors.trees import mapped

_GRADIENTS: Any = (torch.Tensor.grad, torch.Tensor._grad)
_METADATA = METADATA | {torch.Tensor.is_contiguous, *(grad.__get__ for grad in _GRADIENTS)}
_MOVES = MOVEMENT | PICKS | {torch.Tensor.index_select, torch.index_select}
_CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.double: torch.float64}

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class KeepLogits(Exception):
    """The closure does something with its logits that needs all of them."""


@dataclass(frozen=True)
class Head:
    """A linear map and what it was given."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    version: int = field(init=False)
    """The version counter of the weight."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", version(self.weight))

    def detached(self) -> Head:
        """The same without the graph before it."""
        return replace(self, hidden=self.hidden.detach())

    def form(self) -> Tensor:
        """All logits."""
        if version(self.weight) != self.version:
            raise RuntimeError(
                "these logits of a penalised step were never formed, and the head's weight has "
                "changed since; return them as aux: penalty(lambda: (loss, logits))"
            )
        return F.linear(self.hidden, self.weight, self.bias)


class Unformed(Tensor):
    """Some rows of a head's logits, without content."""

    head: Head
    rows: Rows
    """Which rows of ``head.hidden``."""
    looks: list[str]
    """The names of the functions that needed these logits."""
    _make: Callable[[], Tensor]
    _made: Tensor | None

    @classmethod
    def of(cls, head: Head) -> Unformed:
        """All of them."""
        shape = torch.Size((*head.hidden.shape[:-1], head.weight.shape[0]))
        like = torch.empty(shape, dtype=head.hidden.dtype, device="meta")
        found = _Made.apply(_layout(like), head.hidden, head.weight, head.bias)
        return found._filled(head, Rows.of(shape, len(shape) - 1), [], head.form)

    def _filled(
        self, head: Head, rows: Rows, looks: list[str], make: Callable[[], Tensor]
    ) -> Unformed:
        self.head, self.rows, self.looks, self._make, self._made = head, rows, looks, make, None
        return self

    def cut(self) -> Unformed:
        """The same as a leaf, so that the network's graph can be freed."""
        with torch._C.DisableTorchFunction():  # no operation of the model's
            head = self.head.detached()
            leaf: Unformed = _bare(_layout(self), self.device, requires_grad=True)
        path = self._path

        def make() -> Tensor:
            logits = head.form()
            for move in path:
                logits = move(logits)
            return logits

        return leaf._filled(head, self.rows, self.looks, make)

    def copy(self) -> Unformed:
        """The same logits, to be written into."""
        return self._child(self, self.rows, torch.clone)

    _path: tuple[Callable[[Tensor], Tensor], ...] = ()
    """The moves from the head's own logits to these."""

    def form(self, by: str) -> Tensor:
        """The logits themselves."""
        self.looks.append(by)
        if self._made is None:
            # Not an operation of the model, but part of the graph, also under no_grad.
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Shape and type are known, moves are followed, and everything else needs the content."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Unformed) and first._made is None and torch.is_grad_enabled():
            found = first._moved(func, args[1:], kwargs)
            if found is not None:
                return found
        by = called(func)
        args, kwargs = mapped(
            (args, kwargs), lambda t: t.form(by) if isinstance(t, Unformed) else t
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Past the function above comes what PyTorch does to a tensor by itself."""
        raise KeepLogits(str(func))

    def _moved(self, func: Any, rest: Any, kwargs: dict[str, Any]) -> Any:
        if _CASTS.get(func) == self.dtype or self._stays(func, rest, kwargs):
            return self
        if func not in _MOVES:
            return None
        try:
            with torch._C.DisableTorchFunction():
                ghost = torch.empty_strided(
                    self.shape, self.stride(), dtype=self.dtype, device="meta", requires_grad=True
                )
                out = func(ghost, *rest, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return None
        several = isinstance(out, (tuple, list))

        def move(place: int, logits: Tensor) -> Tensor:
            moved = func(logits, *rest, **kwargs)
            return moved[place] if several else moved

        found = []
        for place, part in enumerate(out if several else [out]):
            rows = _followed(self.rows, part)
            if rows is None:
                return None
            found.append(self._child(part, rows, partial(move, place)))
        return type(out)(found) if several else found[0]

    def _stays(self, func: Any, rest: Any, kwargs: dict[str, Any]) -> bool:
        if func is not torch.Tensor.to or kwargs.get("copy"):
            return False
        if rest and isinstance(rest[0], Tensor):
            wanted = (rest[0].device, rest[0].dtype)
        else:
            options = {k: v for k, v in kwargs.items() if k in ("device", "dtype")}
            wanted = torch._C._nn._parse_to(*rest, **options)[:2]
        return wanted[0] in (None, self.device) and wanted[1] in (None, self.dtype)

    def _child(self, like: Tensor, rows: Rows, move: Callable[[Tensor], Tensor]) -> Unformed:
        with torch._C.DisableTorchFunction():
            child = _Made.apply(_layout(like), self)
        child._path = (*self._path, move)
        return child._filled(self.head, rows, self.looks, lambda: move(self.form("a view")))


class _Made(torch.autograd.Function):
    """The place of the logits in the graph; a gradient never passes here."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, first: Tensor, *rest: Tensor | None) -> Tensor:
        """A tensor without content."""
        ctx.set_materialize_grads(False)
        ctx.count = 2 + len(rest)
        return _bare(layout, first.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Nothing, as cross-entropy's gradient is taken elsewhere (``head_loop.py``)."""
        if grad is not None:
            raise KeepLogits("a gradient")
        return (None,) * ctx.count


def _layout(like: Tensor) -> Layout:
    return like.shape, like.stride(), like.dtype


def _bare(layout: Layout, device: torch.device, **options: Any) -> Any:
    shape, stride, dtype = layout
    return Tensor._make_wrapper_subclass(
        Unformed, shape, stride, dtype=dtype, device=device, **options
    )


def _followed(rows: Rows, moved: Tensor) -> Rows | None:
    """The rows after a move, as the nodes of its graph tell."""
    path: list[tuple[Any, int]] = []
    node, port = moved.grad_fn, moved.output_nr
    while node is not None and node.next_functions:
        path.append((node, port))
        if len(node.next_functions) != 1:
            return None
        node, port = node.next_functions[0]
    return follow(rows, path)
