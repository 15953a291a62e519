"""The graph behind a loss: its leaves, and backward hooks of the user's in it.

A hook on a module or on a tensor inside the network may change the gradient, clip it or keep it.
Our passes send other things through the network than the gradient of the loss (differences with a
factor of millions, second derivatives), so that a hook must not meet them: where there is one, the
penalty is taken from a pass of its own, in which no hook is registered. Hooks on parameters see the
whole gradient, once (:func:`quiet`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seht.tensors.process import BACKWARD_HOOKS, GLOBAL_HOOKS

_LEAF = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def mark() -> int:
    """Nodes made from now on have at least this sequence number."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def parents(node: Any) -> list[Any]:
    """The nodes behind one; None for a constant."""
    return [parent for parent, _ in node.next_functions]


def walk(
    start: Iterable[Any],
    ends: Container[Any] = (),
    behind: Callable[[Any], Iterable[Any]] = parents,
) -> Iterator[Any]:
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
            stack.extend(behind(node))


def between(
    roots: Sequence[Tensor], towards: Sequence[Tensor], wanted: Callable[[Any], bool]
) -> Iterator[Any]:
    """The wanted nodes that lie between the roots and the tensors ``towards``."""
    ends = {end for tensor in towards if (end := node_of(tensor)) is not None}
    for node in walk([root.grad_fn for root in roots], ends):
        if wanted(node) and not ends.isdisjoint(walk([node], ends)):
            yield node


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
    *("Permute", "Select", "Slice", "Expand", "Unsqueeze", "Squeeze", "Unbind", "Split"),
    "Diagonal",
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


# --- hooks ----------------------------------------------------------------------------------------


def quiet(leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
    """No hooks of the leaves in the block: they are for the gradient the user will see."""
    tables = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    return _emptied(tables) if tables else nullcontext()


@contextmanager
def _emptied(tables: list[dict[Any, Any]]) -> Iterator[None]:
    saved = [dict(hooks) for hooks in tables]
    for hooks in tables:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in zip(tables, saved, strict=True):
            hooks.update(kept)


REGISTER = frozenset(
    {
        torch.Tensor.register_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.register_post_accumulate_grad_hook,
    }
)
"""Methods that a closure may call on a tensor to see its gradient."""


_FRAMEWORKS = ("torch.distributed.", "torch.utils.", "lightning.fabric.", "lightning_fabric.")


def heard_anyway(args: tuple[Any, ...]) -> bool:
    """Whether a call of :data:`REGISTER` is not the user's: the hook belongs to PyTorch (FSDP
    gathers weights in one) or a framework, changes nothing, and is wanted in every pass.
    """
    hook = args[1] if len(args) > 1 else None
    made_by = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return made_by.startswith(_FRAMEWORKS)


def unheard(*_: Any, **__: Any) -> RemovableHandle:
    """Replaces :data:`REGISTER` where hooks must not run."""
    return RemovableHandle(OrderedDict())


def hooks_of(modules: Iterable[nn.Module]) -> list[dict[Any, Any]]:
    """The backward hooks of these modules, and those of all modules, as far as there are any."""
    found: list[dict[Any, Any]] = [
        hooks
        for module in modules
        for hooks in (module._backward_hooks, module._backward_pre_hooks)
        if hooks
    ]
    return found + [hooks for hooks in GLOBAL_HOOKS if hooks]


def muted(hooks: list[dict[Any, Any]]) -> AbstractContextManager[None]:
    """These hooks do nothing in graphs that are made in the block.

    They are replaced, not removed: a module with hooks runs a few operations more.
    """
    return _muted(hooks) if hooks else nullcontext()


@contextmanager
def _muted(hooks: list[dict[Any, Any]]) -> Iterator[None]:
    own = [part for part in hooks if all(part is not table for table in GLOBAL_HOOKS)]
    saved = [dict(part) for part in own]
    everywhere = len(own) < len(hooks)
    with BACKWARD_HOOKS.on(lambda: _mute(GLOBAL_HOOKS)) if everywhere else nullcontext():
        _mute(own)
        try:
            yield
        finally:
            for part, kept in zip(own, saved, strict=True):
                part.update(kept)


def _mute(hooks: list[dict[Any, Any]]) -> None:
    for part in hooks:
        part.update(dict.fromkeys(part, lambda *_: None))
