r"""Operators that are right at every order of derivative.

The gradient of a Hessian-trace penalty is a third derivative of the loss. PyTorch's fused
normalisations are silently wrong there: the mean and inverse deviation that their double backward
receives carry no history back to the input. ``torch._weight_norm`` is wrong at the second order
already, and flash attention and cuDNN's recurrent kernels have no double backward. While a
:class:`SafeOps` mode is active, each of them is answered by a form made of elementary operations
(``norms.py``; attention and recurrent layers by PyTorch's own kernel, ``layers.py``), whether it is
called by its name in ``torch`` or, as exported models do, in ``torch.ops.aten``. The model is not
edited, and the tensors that come out are ordinary ones, with the fused operators' strides. What no
mode sees (an operator that C++ calls) is found in the graph afterwards (``orders.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from seht.operators.table import SAFE
from seht.tensors.graph import REGISTER, heard_anyway, unheard
from seht.tensors.process import math_attention


class SafeOps(TorchFunctionMode):
    """Answers every function in :data:`SAFE` by its replacement while active; with ``deaf`` no
    tensor gets a hook.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__()
        self._deaf = deaf
        self.hooked = False
        """Whether a hook was asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look the function up; everything else passes."""
        if func in REGISTER and not heard_anyway(args):
            self.hooked = True
            if self._deaf:
                return unheard()
        return SAFE.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def safe_ops(*, deaf: bool = False) -> Iterator[SafeOps]:
    """Everything in the block is differentiable at every order: the mode, and math attention, which
    functions like ``F.multi_head_attention_forward`` call where no mode sees it.
    """
    with math_attention(), SafeOps(deaf=deaf) as mode:
        yield mode
