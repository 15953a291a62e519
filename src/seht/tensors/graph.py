"""The graph behind a loss: its leaves, and gradients that are handed out later."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAF = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def mark() -> int:
    """Nodes made from now on have at least this sequence number."""
    probe = torch.zeros((), requires_grad=True, device="cpu") + 0
    return int(probe.grad_fn._sequence_nr())  # type: ignore[union-attr]


def walk(start: Iterable[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """Every node behind these, each once, and not past the ``ends``."""
    seen: set[Any] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node not in ends:
            stack.extend(parent for parent, _ in node.next_functions)


def node_of(tensor: Tensor) -> Any:
    """The graph node of a tensor; None if it has none."""
    if tensor.grad_fn is not None or not tensor.requires_grad:
        return tensor.grad_fn
    return torch.autograd.graph.get_gradient_edge(tensor).node


def leaves_of(roots: Sequence[Tensor], stop: Sequence[Tensor] = ()) -> list[Tensor]:
    """Every leaf that the roots depend on, not past ``stop``.

    All of them, not only the model's: a second module, an input, a captured parameter receive
    their share of the penalty's gradient too.
    """
    ends = {tensor.grad_fn for tensor in stop if tensor.grad_fn is not None}
    nodes = walk((root.grad_fn for root in roots), ends)
    return [node.variable for node in nodes if isinstance(node, _LEAF)]


_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32}
_COARSEST = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


@dataclass(frozen=True)
class Survey:
    """The results of one walk through the graph behind some roots."""

    leaves: list[Tensor]
    """As in :func:`leaves_of`."""
    older: bool
    """Whether a part of the graph is older than the closure: it belongs to the user (features that
    were computed before) and must survive our passes.
    """
    coarsest: torch.dtype | None
    """The least precise type that a gradient passes through on its way from the roots.

    A model in float64 may cast to float32 inside (Hugging Face's norms, rotations and losses do),
    and its gradients are then no better than float32. The cast of the loss itself rounds none.
    """


def survey(roots: Sequence[Tensor], since: int = 0) -> Survey:
    """The leaves, the age and the types of a graph."""
    leaves: list[Tensor] = []
    older = False
    types: set[torch.dtype] = set()
    seen: set[Any] = set()
    walked: set[Any] = set()
    # Only results that are used: an output that was not computed would pass for float32.
    stack = [(root.grad_fn, root.output_nr) for root in roots]
    casts = [node for node, _ in stack if node is not None and node.name() == "ToCopyBackward0"]
    while stack:
        edge = stack.pop()
        node, place = edge
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if node not in casts:
            types.add(node._input_metadata[place].dtype)
        if node in walked:
            continue
        walked.add(node)
        if isinstance(node, _LEAF):
            leaves.append(node.variable)
        elif not older and node._sequence_nr() < since:
            older = True
        stack.extend(node.next_functions)
    found = max((_COARSEST.get(_REAL.get(dtype, dtype), 0) for dtype in types), default=0)
    coarsest = next((dtype for dtype, rank in _COARSEST.items() if rank == found), None)
    return Survey(leaves, older, coarsest)


def coarser(a: torch.dtype, b: torch.dtype | None) -> torch.dtype:
    """The less precise of two types."""
    return b if b is not None and _COARSEST.get(b, 0) > _COARSEST.get(a, 0) else a


def first_uses(roots: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that the roots depend on, in the order in which the closure first used them.

    Unlike the order of a walk it does not depend on what a replayed operation is made of.
    """
    found: dict[Any, tuple[int, int]] = {}
    for node in walk(root.grad_fn for root in roots):
        for place, (parent, _) in enumerate(node.next_functions):
            if isinstance(parent, _LEAF):
                use = (node._sequence_nr(), place)
                found[parent] = min(found.get(parent, use), use)
    return [leaf.variable for leaf in sorted(found, key=found.__getitem__)]


_VIEWS = (
    *("ViewBackward", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "TBackward", "Transpose"),
    *(
        "Permute",
        "Select",
        "Slice",
        "Expand",
        "Unsqueeze",
        "Squeeze",
        "Unbind",
        "Split",
        "Diagonal",
    ),
)
"""What a view of a weight leaves in the graph: it lies in the weight's memory and moves with it."""


def older_leaves(roots: Sequence[Tensor], since: int) -> list[Tensor]:
    """The leaves that are reached through nodes older than ``since``, mere views left aside."""
    found: list[Tensor] = []
    seen: set[tuple[Any, bool]] = set()
    stack = [(root.grad_fn, False) for root in roots]
    while stack:
        node, older = stack.pop()
        if node is None or (node, older) in seen:
            continue
        seen.add((node, older))
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.extend([variable] if older else [])
        else:
            older = older or (node._sequence_nr() < since and not node.name().startswith(_VIEWS))
        stack.extend((parent, older) for parent, _ in node.next_functions)
    return found


def refuse_older(weights: dict[str, Tensor], roots: Sequence[Tensor], since: int) -> None:
    """Refuse drawn weights in a graph older than ``since``: no pass would compute it anew."""
    outside = {id(leaf) for leaf in older_leaves(roots, since)}
    for name, weight in weights.items():
        if id(weight) in outside:
            raise RuntimeError(
                f"parameter {name!r} reaches the loss through tensors that were computed before "
                "the closure, which cannot be computed anew at other weights; compute them inside "
                "the closure, or detach() them"
            )


def quiet(leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
    """No hooks of the leaves in the block: they are for the gradient the user will see."""
    hooked = [leaf for leaf in leaves if leaf._backward_hooks]
    return _quiet(hooked) if hooked else nullcontext()


@contextmanager
def _quiet(leaves: list[Tensor]) -> Iterator[None]:
    tables = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    hooked = [(hooks, dict(hooks)) for hooks in tables]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)


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
    def _parts(ctx: Any, grad: Tensor) -> list[Tensor | None]:
        scaled: dict[tuple[int, torch.dtype | None], Tensor] = {}  # most scales are one number
        parts: list[Tensor | None] = []
        for g, s in zip(ctx.gradients, ctx.scales, strict=True):
            if g is None:
                parts.append(None)
                continue
            dtype = g.dtype if isinstance(g, Tensor) else None
            factor = scaled.get((id(s), dtype))
            if factor is None:
                factor = grad * s if dtype is None else (grad * s).to(dtype)
                scaled[id(s), dtype] = factor
            parts.append(g * factor if isinstance(g, Tensor) else factor)
        return parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The stored gradients, times what comes from above."""
        with torch.no_grad():
            parts = Stored._parts(ctx, grad)
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
