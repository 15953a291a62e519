"""Layers: products with a weight, embeddings, recurrent layers and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seht.errors import KinkError
from seht.operators.constants import DRAWN
from seht.operators.operator import Depends, Operator, by_name, each, jointly, named
from seht.operators.rules import Mode, Rule, refused
from seht.tensors.memory import laid_out, layout_of
from seht.tensors.process import ATTENTION, without_cudnn


def _padded(function: Any, ids: str) -> Rule:
    """Embeddings: to autograd the row of ``padding_idx`` is a constant."""
    named_as = by_name(function)

    def record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = named_as(args, kwargs)
        weight, padding = given["weight"], given.get("padding_idx")
        if given.get("max_norm") is not None:
            raise KinkError(
                "embedding with max_norm rewrites its weights in every pass, which the difference "
                "engine cannot freeze; normalise the weights before the closure"
            )
        if padding is not None and function is F.embedding:
            padding %= len(weight)  # a negative one means none to torch.embedding
        known = padding is not None and padding >= 0
        row = (padding, weight[padding].detach().clone()) if known else None
        return func(*args, **kwargs), row

    def replay(mode: Mode, row: Any, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if row is None:
            return out
        return torch.where((named_as(args, kwargs)[ids] == row[0]).unsqueeze(-1), row[1], out)

    return Rule(record, replay)


PADDED = _padded(F.embedding, "input")


def _bag_kink(
    input: Any, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False, mode: str = "mean", *_: Any, **__: Any,
) -> bool:  # fmt: skip
    return mode == "max" or max_norm is not None


_BAG = refused("with mode='max' or max_norm has kinks", _bag_kink)
_FUSED_BAG = refused(
    "with mode='max' has kinks",
    lambda weight, indices, offsets, scale=False, mode=0, *_, **__: mode == 2,
)


def _by_mathematics(function: Callable[..., Any]) -> Callable[..., Any]:
    # Flash attention has no double backward. The kernel that PyTorch would choose says how its
    # result lies in memory.
    def call(*args: Any, **kwargs: Any) -> Any:
        query = args[0] if args else kwargs["query"]
        devices = [query.device] if query.is_cuda else []
        allowed = ATTENTION.read()
        allowed = ATTENTION.before if allowed == [SDPBackend.MATH] else allowed
        with torch.no_grad(), torch.random.fork_rng(devices), sdpa_kernel(allowed):
            plain = function(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return laid_out(function(*args, **kwargs), layout_of(plain))

    return call


def _without_cudnn(function: Callable[..., Any]) -> Callable[..., Any]:
    # PyTorch's own recurrent kernels are composed of differentiable operations; cuDNN's are not.
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_cudnn():
            return function(*args, **kwargs)

    return call


_embedding_arguments = by_name(F.embedding)


def _rows(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Embedding is affine, as it picks rows, unless it shortens them first."""
    shortens = _embedding_arguments(args, kwargs).get("max_norm") is not None
    return None if shortens else jointly(given, args, kwargs)


OPERATORS = (
    Operator("""
        matmul mm bmm __matmul__ addmm baddbmm linear bilinear einsum conv1d conv2d conv3d
        conv_transpose1d conv_transpose2d conv_transpose3d
    """, affine=each),
    Operator((F.embedding,), PADDED, affine=_rows, by_content=True),
    Operator(
        named("embedding", F.embedding), _padded(torch.embedding, "indices"),
        affine=jointly, by_content=True,
    ),
    Operator((F.embedding_bag,), _BAG, by_content=True),
    Operator(named("embedding_bag _embedding_bag", F.embedding_bag), _FUSED_BAG, by_content=True),
    Operator("lstm gru rnn_tanh", DRAWN, safe=_without_cudnn),
    Operator("rnn_relu", refused("has kinks"), safe=_without_cudnn),
    Operator("rnn_relu_cell", refused("has kinks")),
    Operator("scaled_dot_product_attention", DRAWN, safe=_by_mathematics),
    Operator("multi_head_attention_forward", DRAWN),
)  # fmt: skip
