"""Operations whose backward pass is right only for gradients of an ordinary size.

A difference sends gradients of order 1 / e^2 through the closure's graph. Nearly every backward
pass is linear to the last bit, so their size does not matter. That of the matrix exponential is
not: it takes the exponential of a block matrix with matrix and gradient in it, and a large gradient
swamps the matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.operators.operator import Operator
from seht.operators.rules import Mode, first, untaped


def evened(mode: Mode, func: Any, args: Any, kwargs: Any) -> Tensor:
    """The function of a matrix; its gradient is brought to size 1 on the way in, and back."""
    x = first(args, kwargs)
    plain = torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.requires_grad
    if plain or is_functorch_wrapped_tensor(x):
        return func(*args, **kwargs)
    sizes: list[Tensor] = []

    def shrink(gradient: Tensor) -> Tensor:
        size = gradient.detach().abs().amax((-2, -1), keepdim=True)
        sizes[:] = [torch.where(size > 0, size, 1.0)]
        return gradient / sizes[0]

    own = x.view_as(x)
    own.register_hook(lambda gradient: gradient * sizes[0])
    y: Tensor = func(own)
    y.register_hook(shrink)
    return y


OPERATORS = (Operator("matrix_exp linalg_matrix_exp", untaped(evened)),)
