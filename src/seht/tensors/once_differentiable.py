"""Functions that can be differentiated once, where a second derivative is asked for.

A custom ``autograd.Function`` may mark its backward ``@once_differentiable``. PyTorch then raises
in a second *backward* only, and only where the gradient that comes from above has a graph. Under a
loss that is linear in the function's output, and in every ``autograd.grad`` towards other tensors,
the derivative is silently missing. So the graph is searched for the mark before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from seht.tensors.graph import node_of, walk

_MARKED = once_differentiable(lambda ctx: None).__code__


def refuse_once(roots: Sequence[Tensor], towards: Sequence[Tensor], fix: str) -> None:
    """Raise if a marked function lies between the roots and the tensors ``towards``."""
    ends = {end for tensor in towards if (end := node_of(tensor)) is not None}
    for node in walk([root.grad_fn for root in roots], ends):
        function: Any = getattr(node, "_forward_cls", None)
        if not isinstance(node, BackwardCFunction) or not _marked(function):
            continue
        if not ends.isdisjoint(walk([node], ends)):
            raise RuntimeError(
                f"{function.__name__} has no double backward: it is marked @once_differentiable, "
                f"and its second derivative would silently be 0; {fix}"
            )


def _marked(function: Any) -> bool:
    both = (getattr(function, name, None) for name in ("backward", "vjp"))  # one is the other
    return any(getattr(backward, "__code__", None) is _MARKED for backward in both)
