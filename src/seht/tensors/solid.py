"""PyTorch's zero tensors, kept out of higher derivatives.

The derivative of a real number's sign is handed on as a tensor without memory, which nobody may
write into. The derivative of a complex absolute value does: where ``|a|`` comes behind ``|c|`` (an
L1 loss of magnitudes, say of spectra), a double backward ends with "ZeroTensors are immutable".
Nothing at all, which autograd takes for 0, is handed on instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from seht.tensors.graph import walk

_MARK = "seht.solid"


def solid(tensors: Iterable[Tensor | None]) -> None:
    """Make these safe to differentiate further."""
    roots = [t.grad_fn for t in tensors if t is not None]
    for node in walk(roots):
        if is_real_sign(node) and _MARK not in node.metadata:
            node.metadata[_MARK] = True
            node.register_hook(_nothing)


def is_real_sign(node: Any) -> bool:
    """Whether this is the derivative of a real sign: 0."""
    return node.name() == "SgnBackward0" and not node._input_metadata[0].dtype.is_complex


def _nothing(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(None for _ in gradients)
