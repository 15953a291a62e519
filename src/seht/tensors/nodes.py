"""Functions that can be differentiated once, where a second derivative is asked for.

A custom ``autograd.Function`` may mark its backward ``@once_differentiable``. PyTorch then raises
in a second *backward* only, and only where the gradient that comes from above has a graph. Under a
loss that is linear in the function's output, and in every ``autograd.grad`` towards other tensors,
the derivative is silently missing. So the graph is searched for the mark before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

_MARKED = once_differentiable(lambda ctx: None).__code__


def refuse_once(roots: Sequence[Tensor], towards: Sequence[Tensor], fix: str) -> None:
    """Raise if a marked function lies between the roots and the tensors ``towards``."""
    ends = {end for tensor in towards if (end := node_of(tensor)) is not None}
    for node in reached([root.grad_fn for root in roots], ends):
        function: Any = getattr(node, "_forward_cls", None)
        if not isinstance(node, BackwardCFunction) or not _marked(function):
            continue
        if not ends.isdisjoint(reached([node], ends)):
            raise RuntimeError(
                f"{function.__name__} has no double backward: it is marked @once_differentiable, "
                f"and its second derivative would silently be 0; {fix}"
            )


def _marked(function: Any) -> bool:
    both = (getattr(function, name, None) for name in ("backward", "vjp"))  # one is the other
    return any(getattr(backward, "__code__", None) is _MARKED for backward in both)


def node_of(tensor: Tensor) -> Any:
    """What stands for a tensor in a graph; None where it has no place in one."""
    if tensor.grad_fn is not None or not tensor.requires_grad:
        return tensor.grad_fn
    return torch.autograd.graph.get_gradient_edge(tensor).node


def reached(start: Sequence[Any], ends: set[Any]) -> set[Any]:
    """The nodes that are reached without going past the ends."""
    seen: set[Any] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node not in ends:
            stack.extend(parent for parent, _ in node.next_functions)
    return seen
