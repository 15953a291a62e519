r"""Normalisations that are right at every order of derivative, laid out as the fused ones are.

Each call runs PyTorch's own operator first, without a graph: it moves the running statistics,
refuses what it refuses, and shows how its result lies in memory. Then the result is computed anew
from elementary operations, which carry the graph, and put into memory in the same way: a
``.view()`` behind the norm finds the strides that it would find, and a dropout, which draws its
numbers in the order of memory, the mask that it would draw.

Further results of an operator (the mean and inverse deviation of ``native_layer_norm``) have no
derivative in PyTorch, and have none here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.arithmetic import within
from seht.operators.axes import Broken, Call, Tag
from seht.operators.operator import Depends, Operator, by_name, each
from seht.tensors.memory import laid_out, layout_of

Formula = Callable[..., Tensor]
"""Takes an operator's arguments by name."""


def normalise(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    r""":math:`(x - \mu) / \sqrt{\sigma^2 + \epsilon}` over ``dims``, with the biased variance."""
    centred = x - x.mean(dims, keepdim=True)
    return centred * ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt()


def _affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _wide(x: Tensor) -> Tensor:
    # The fused kernels normalise half precision in float32; so do we.
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _channels(x: Tensor) -> tuple[int, ...]:
    return (1, x.shape[1]) + (1,) * (x.dim() - 2)


def _batch(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    running_mean: Tensor | None = None, running_var: Tensor | None = None, training: bool = False,
    eps: float = 1e-5, **_: Any,
) -> Tensor:  # fmt: skip
    """Over the batch; with the running statistics where it does not train."""
    x, shape = _wide(input), _channels(input)
    if training:
        x = normalise(x, (0, *range(2, input.dim())), eps)
    else:
        assert running_mean is not None and running_var is not None  # else it has been refused
        x = (x - running_mean.view(shape)) * (running_var.view(shape) + eps).rsqrt()
    return _affine(x, weight, bias, shape)


def _legit(input: Tensor, running_mean: Any = None, **given: Any) -> Tensor:
    """One name for two operators: the other has no statistics, and its flag in their place."""
    if isinstance(running_mean, bool):
        place = given.get("training", given.get("eps", 1e-5))
        return _batch(
            input, given.get("weight"), given.get("bias"), None, None, running_mean, place
        )
    return _batch(input, running_mean=running_mean, **given)


def _instance(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    use_input_stats: bool = True, eps: float = 1e-5, **given: Any,
) -> Tensor:  # fmt: skip
    """Over the positions of each example."""
    if not use_input_stats:
        return _batch(input, weight, bias, eps=eps, **given)
    x = normalise(_wide(input), tuple(range(2, input.dim())), eps)
    return _affine(x, weight, bias, _channels(input))


def _layer(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, **_: Any,
) -> Tensor:  # fmt: skip
    """Over the last axes."""
    shape = tuple(normalized_shape)
    return _affine(normalise(_wide(input), tuple(range(-len(shape), 0)), eps), weight, bias, shape)


def _weight(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``g * v / |v|``, the norm over every axis but ``dim``."""
    kept = None if dim == -1 else dim % v.dim()  # -1 is PyTorch's word for "the whole norm"
    axes = tuple(i for i in range(v.dim()) if i != kept)
    return v * (g / (v * v).sum(axes, keepdim=True).sqrt())


def _fused(formula: Formula) -> Callable[[Any], Callable[..., Any]]:
    """Makes the replacement of an operator."""

    def safe(operator: Any) -> Callable[..., Any]:
        named = by_name(operator)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = {n: _detached(v) for n, v in kwargs.items()}
            with torch.no_grad():
                plain = operator(*map(_detached, args), **given)
            alone = isinstance(plain, Tensor)
            first = plain if alone else plain[0]
            result = formula(**named(args, kwargs)).to(first.dtype)
            result = laid_out(result, layout_of(first))
            return result if alone else (result, *plain[1:])

        return call

    return safe


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


_batch_norm_arguments = by_name(F.batch_norm)


def _stored_statistics(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Batch norm: with stored statistics a scale and a shift."""
    found = _batch_norm_arguments(args, kwargs)
    stored = found.get("running_mean") is not None and not found.get("training", False)
    return each(given, args, kwargs) if stored else None


def _last(call: Call, rank: int) -> range:
    return range(rank - len(call.argument(1, "normalized_shape")), rank)


def _batch_axes(call: Call) -> Tag | None:
    x, axis = call.main()
    batch = call.argument(5, "training", False) or call.argument(1, "running_mean") is None
    if batch and axis is not None and call.varies(x):
        return Broken(
            "BatchNorm in train mode makes every example depend on all others (put it in eval "
            "mode, use GroupNorm or LayerNorm, or opt in with coupling='own' or "
            "coupling='frozen', which estimate something else)"
        )
    return within(lambda *_: (1,))(call)


OPERATORS = (
    Operator("batch_norm", axes=_batch_axes, affine=_stored_statistics, safe=_fused(_batch)),
    Operator("""
        native_batch_norm _batch_norm_impl_index _native_batch_norm_legit_functional
        cudnn_batch_norm miopen_batch_norm _batch_norm_no_update
        _native_batch_norm_legit_no_training
    """, safe=_fused(_batch)),
    Operator("_native_batch_norm_legit", safe=_fused(_legit)),
    Operator("_batch_norm_with_update _batch_norm_with_update_functional", safe=_fused(
        lambda **given: _batch(**given | {"training": True})
    )),
    Operator("instance_norm", safe=_fused(_instance)),
    Operator("layer_norm", axes=within(_last), safe=_fused(_layer)),
    Operator("native_layer_norm", safe=_fused(_layer)),
    Operator("rms_norm", axes=within(_last)),
    Operator("group_norm", axes=within(lambda _, rank: range(1, rank))),
    Operator("_weight_norm _weight_norm_interface", safe=_fused(_weight)),
)  # fmt: skip
