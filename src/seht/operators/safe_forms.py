r"""Operators that are right at every order of derivative.

The gradient of a Hessian-trace penalty is a third derivative of the loss. PyTorch's fused
normalisations are silently wrong there: the mean and inverse deviation that their double backward
receives carry no history back to the input. ``torch._weight_norm`` is wrong at the second order
already, and flash attention and cuDNN's recurrent kernels have no double backward. While a
:class:`SafeOps` mode is active, each of them is answered by a form made of elementary operations
(:mod:`seht.operators.normalisations`; attention and recurrent layers by PyTorch's own kernel),
whether it is called by its name in ``torch`` or, as exported models do, in ``torch.ops.aten``. The
model is not edited, and the tensors that come out are ordinary ones, with the fused operators'
strides. What no mode sees (an operator that C++ calls) is found in the graph afterwards
(``engines/orders.py``).

:data:`SAFE` is the whole table: function object to replacement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.overrides import TorchFunctionMode

from seht.operators import losses
from seht.operators.normalisations import NORMS
from seht.tensors.hooks import REGISTER, heard_anyway, unheard
from seht.tensors.layouts import laid_out, layout_of
from seht.tensors.modulus import MODULI, modulus
from seht.tensors.process import ATTENTION


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    # The fused operator has no double backward.
    y = F.relu6(input + 3) / 6
    return input.copy_(y) if inplace else y


def _absolute(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is not None or not input.is_complex():
        return torch.abs(input, out=out)
    return modulus(input, input.detach() == 0)


def _distance(native: Callable[..., Tensor], parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Without a double backward. Those of p = 2 have a singular one where two rows are the same.
    def call(*args: Any, **kwargs: Any) -> Tensor:
        p = kwargs.get("p", next((a for a in args if not isinstance(a, Tensor)), 2.0))
        return (parts if p in (1, math.inf) else native)(*args, **kwargs)

    return call


def _aten_hardsigmoid_(self: Tensor) -> Tensor:
    return _hardsigmoid(self, inplace=True)


def _attention(function: Callable[..., Any]) -> Callable[..., Any]:
    # The kernel that PyTorch would choose says how its result lies in memory.
    def call(*args: Any, **kwargs: Any) -> Any:
        query = args[0] if args else kwargs["query"]
        devices = [query.device] if query.is_cuda else []
        allowed = _cur_sdpa_kernel_backends()
        allowed = ATTENTION.get() if allowed == [SDPBackend.MATH] else allowed
        with torch.no_grad(), torch.random.fork_rng(devices), sdpa_kernel(allowed):
            plain = function(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return laid_out(function(*args, **kwargs), layout_of(plain))

    return call


def _unchunked(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    # With options it computes its gradient beforehand, as numbers without a graph.
    return F.linear_cross_entropy(*args, **kwargs)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    # At 0 the fused double backward takes another side than the backward.
    if weight.numel() > 1 and input.dim() > 1:
        weight = weight.view(1, -1, *(1,) * (input.dim() - 2))
    return torch.where(input > 0, input, weight * input)


def _without_cudnn(function: Callable[..., Any]) -> Callable[..., Any]:
    # PyTorch's own recurrent kernels are composed of differentiable operations; cuDNN's are not.
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return function(*args, **kwargs)

    return call


aten = torch.ops.aten
SAFE: dict[Any, Callable[..., Any]] = {
    **NORMS,
    F.hardsigmoid: _hardsigmoid,
    **dict.fromkeys(MODULI, _absolute),
    **dict.fromkeys((aten.hardsigmoid, aten.hardsigmoid.default), _hardsigmoid),
    **dict.fromkeys((aten.hardsigmoid_, aten.hardsigmoid_.default), _aten_hardsigmoid_),
    F.multi_margin_loss: losses.multi_margin,
    F.multilabel_margin_loss: losses.multilabel_margin,
    torch.cdist: _distance(torch.cdist, losses.cdist),
    torch.pdist: _distance(torch.pdist, losses.pdist),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), _prelu),
    **{f: _without_cudnn(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    **{
        f: _attention(f)
        for f in (
            F.scaled_dot_product_attention,
            aten.scaled_dot_product_attention,
            aten.scaled_dot_product_attention.default,
        )
    },
}
if hasattr(F, "linear_cross_entropy"):  # of torch 2.13
    SAFE[F.linear_cross_entropy] = _unchunked


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
    allowed = _cur_sdpa_kernel_backends()
    token = ATTENTION.set(allowed if allowed != [SDPBackend.MATH] else ATTENTION.get(allowed))
    try:
        with sdpa_kernel(SDPBackend.MATH), SafeOps(deaf=deaf) as mode:
            yield mode
    finally:
        ATTENTION.reset(token)
