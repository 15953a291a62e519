r"""How a decision is recorded at the centre and replayed at the perturbed weights.

The Hessian of a network ignores its kinks: the second derivative of a ReLU is 0 almost everywhere.
A finite step crosses them. So the centre pass records every decision (the side of each ReLU, the
place of each maximum, the outcome of each comparison) and the perturbed passes replay it: along
the step the network is then smooth, and has at the centre the derivatives that autograd gives it.

A rule has two functions: ``record(mode, func, args, kwargs) -> (output, decision)`` runs the
operation and says what to remember; ``replay(mode, decision, func, args, kwargs) -> output``
computes the smooth continuation. The table of which function follows which rule is in ``table.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

Record = Callable[[TorchFunctionMode, Any, Any, Any], tuple[Any, Any]]
Replay = Callable[[TorchFunctionMode, Any, Any, Any, Any], Any]


class KeepGraph(Exception):
    """The lean form has to keep the centre's graph, because the closure itself uses it."""


class Rule(NamedTuple):
    """How one function is frozen."""

    record: Record
    replay: Replay
    taped: bool = True
    """False where the function itself leaves nothing to remember: its parts may."""
    always: bool = False
    """Whether it holds for constants, too."""


def first(args: Any, kwargs: Any) -> Any:
    """The tensor an operation works on."""
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def depends(args: Any, kwargs: Any) -> bool:
    """Whether an argument may depend on the weights: constants need no freezing."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad or _within_transform(value):
                return True
        elif isinstance(value, (tuple, list)) and depends(value, {}):
            return True
    return False


def _within_transform(value: Tensor) -> bool:
    """Whether this is a tensor of ``torch.vmap``, which never says that it requires a gradient."""
    return not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(value)


def write_back(x: Tensor, y: Tensor, in_place: bool) -> Tensor:
    """The result of an operation that may have been asked to overwrite its argument."""
    return x.copy_(y) if in_place else y
