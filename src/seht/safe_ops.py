r"""Operators that are right at every order of derivative.

The gradient of a Hessian-trace penalty is a third derivative of the loss. PyTorch's fused
normalisations are silently wrong there: the mean and inverse deviation that their double backward
receives carry no history back to the input. ``torch._weight_norm`` is wrong at the second order
already, and flash attention and cuDNN's recurrent kernels have no double backward. While a
:class:`SafeOps` mode is active, each of them is answered by a form made of elementary operations
(or, for attention and recurrent layers, by PyTorch's own differentiable kernel). The model is not
edited, and the tensors that come out are ordinary tensors.

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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from seht import losses
from seht.hooks import REGISTER, heard_anyway, unheard
from seht.modulus import MODULI, modulus


def normalise(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`(x - \mu) / \sqrt{\sigma^2 + \epsilon}` over ``dims``, mean and biased variance."""
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    var = (centred * centred).mean(dims, keepdim=True)
    return centred * (var + eps).rsqrt(), mean, var


def _affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _wide(x: Tensor) -> Tensor:
    # The fused kernels normalise half precision in float32; so do we.
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@torch.no_grad()
def _update(running: Tensor | None, batch: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(batch.detach().to(running.dtype), alpha=momentum)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm``; running statistics are moved as the fused operator moves them."""
    channels = (1, input.shape[1]) + (1,) * (input.dim() - 2)
    x = _wide(input)
    if training:
        dims = (0, *range(2, input.dim()))
        count = input.numel() // input.shape[1]
        if count <= 1:
            raise ValueError(
                f"batch norm needs more than one value per channel to train, got {input.shape}"
            )
        x, mean, var = normalise(x, dims, eps)
        _update(running_mean, mean.flatten(), momentum)
        _update(running_var, var.flatten() * (count / (count - 1)), momentum)
    else:
        if running_mean is None or running_var is None:
            raise ValueError("batch norm in evaluation mode needs running statistics")
        x = (x - running_mean.view(channels)) * (running_var.view(channels) + eps).rsqrt()
    return _affine(x, weight, bias, channels).to(input.dtype)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm`` for inputs with a batch axis."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = tuple(range(2, input.dim()))
    count = input.shape[2:].numel()
    if count <= 1:
        raise ValueError(f"instance norm needs more than one spatial element, got {input.shape}")
    x, mean, var = normalise(_wide(input), dims, eps)
    _update(running_mean, mean.mean(0).flatten(), momentum)
    _update(running_var, var.mean(0).flatten() * (count / (count - 1)), momentum)
    return _affine(x, weight, bias, (1, input.shape[1]) + (1,) * len(dims)).to(input.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm``."""
    shape = tuple(normalized_shape)
    if input.shape[-len(shape) :] != shape:
        raise ValueError(f"layer norm over {shape} does not fit an input of {input.shape}")
    x, _, _ = normalise(_wide(input), tuple(range(-len(shape), 0)), eps)
    return _affine(x, weight, bias, shape).to(input.dtype)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``torch._weight_norm``: ``g * v / |v|``, the norm over every axis but ``dim``."""
    kept = None if dim == -1 else dim % v.dim()  # -1 is PyTorch's word for "the whole norm"
    axes = tuple(i for i in range(v.dim()) if i != kept)
    return v * (g / (v * v).sum(axes, keepdim=True).sqrt())


def _torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    # torch.batch_norm takes its arguments in another order than F.batch_norm.
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _torch_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    return instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


def _torch_layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return layer_norm(input, normalized_shape, weight, bias, eps)


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


def _without_cudnn(function: Callable[..., Any]) -> Callable[..., Any]:
    # PyTorch's own recurrent kernels are composed of differentiable operations; cuDNN's are not.
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return function(*args, **kwargs)

    return call


def _refuse(what: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{what}; use engine='difference', which needs first derivatives only")

    return call


SAFE: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _torch_batch_norm,
    F.instance_norm: instance_norm,
    torch.instance_norm: _torch_instance_norm,
    F.layer_norm: layer_norm,
    torch.layer_norm: _torch_layer_norm,
    torch._weight_norm: weight_norm,
    F.hardsigmoid: _hardsigmoid,
    **dict.fromkeys(MODULI, _absolute),
    F.multi_margin_loss: losses.multi_margin,
    F.multilabel_margin_loss: losses.multilabel_margin,
    torch.cdist: _distance(torch.cdist, losses.cdist),
    torch.pdist: _distance(torch.pdist, losses.pdist),
    **{f: _without_cudnn(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    **{
        f: _refuse(f"{f.__name__} is wrong at the third order and has no replacement here")
        for f in (
            torch.native_batch_norm,
            torch.native_layer_norm,
            torch.cudnn_batch_norm,
            torch.miopen_batch_norm,
        )
    },
}


class SafeOps(TorchFunctionMode):
    """Answers every function in :data:`SAFE` by its replacement while active.

    ``between`` is called between the operations; with ``deaf`` no tensor gets a hook.
    """

    def __init__(self, between: Callable[[], None] | None = None, *, deaf: bool = False) -> None:
        super().__init__()
        self._between, self._deaf = between, deaf
        self.hooked = False
        """Whether a hook was asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look the function up; everything else passes."""
        if self._between is not None:
            self._between()
        if func in REGISTER and not heard_anyway(args):
            self.hooked = True
            if self._deaf:
                return unheard()
        return SAFE.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def safe_ops(between: Callable[[], None] | None = None, *, deaf: bool = False) -> Iterator[SafeOps]:
    """Everything in the block is differentiable at every order: the mode, and math attention."""
    with sdpa_kernel(SDPBackend.MATH), SafeOps(between, deaf=deaf) as mode:
        yield mode
