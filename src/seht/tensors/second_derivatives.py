"""Two pitfalls of PyTorch where a graph is differentiated a second time.

*Functions with one derivative.* A custom ``autograd.Function`` may mark its backward
``@once_differentiable``. PyTorch then raises only in a second *backward*, and only if the incoming
gradient has a graph. With a loss that is linear in the function's output, and in every
``autograd.grad`` towards other tensors, the derivative is silently missing. So the graph is
searched for the mark beforehand.

*Zeros without memory.* PyTorch represents the derivative of a real sign by a tensor without memory,
which cannot be written to. But the derivative of a complex absolute value writes: if ``|a|``
follows ``|c|`` (an L1 loss of magnitudes, say of spectra), a double backward ends with "ZeroTensors
are immutable". Here no gradient at all, which autograd takes for 0, is passed on instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from seht.tensors.graph import between, walk

_ONCE = once_differentiable(lambda ctx: None).__code__
_SOLID = "seht.solid"


def refuse_once(roots: Sequence[Tensor], towards: Sequence[Tensor], fix: str) -> None:
    """Raise if a marked function lies between the roots and the tensors ``towards``."""
    for node in between(roots, towards, _marked):
        raise RuntimeError(
            f"{node._forward_cls.__name__} has no double backward: it is marked "
            f"@once_differentiable, and its second derivative would silently be 0; {fix}"
        )


def _marked(node: Any) -> bool:
    if not isinstance(node, BackwardCFunction):
        return False
    function: Any = getattr(node, "_forward_cls", None)
    both = (getattr(function, name, None) for name in ("backward", "vjp"))  # one is the other
    return any(getattr(backward, "__code__", None) is _ONCE for backward in both)


def solid(tensors: Iterable[Tensor | None]) -> None:
    """Make these safe to differentiate further."""
    roots = [t.grad_fn for t in tensors if t is not None]
    for node in walk(roots):
        if is_real_sign(node) and _SOLID not in node.metadata:
            node.metadata[_SOLID] = True
            node.register_hook(lambda gradients, _: tuple(None for _ in gradients))


def is_real_sign(node: Any) -> bool:
    """Whether this is the derivative of a real sign: 0."""
    return node.name() == "SgnBackward0" and not node._input_metadata[0].dtype.is_complex
