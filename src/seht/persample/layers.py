"""Per-sample layer rules: what an operation that uses a probed weight does with one per example.

One entry of the table for each operation. Those of products say which dimension of the weight
meets the channels of the input (``into``) and which those of the output (``out``):

    operation          weight               into   out
    linear             (out, in)            1      0
    matmul, addmm      (in, out)            0      1
    convolution        (out, in/g, ...)     1 * g  0
    transposed         (in, out/g, ...)     0      1 * g

The signs belong to the pair (weight, example): the same at every position, time step and call.
Embeddings have one for each (example, token); norms one for each (example, channel). Recurrent
layers and attention are run as the linear maps they are made of (``recurrent.py``).
A weight that is used in any other way keeps one direction for all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seht.operators.axes import Axis, Broken, along
from seht.operators.layers import PADDED
from seht.operators.operator import named
from seht.operators.rules import Mode, Recording, Rule, opened
from seht.persample import recurrent
from seht.persample.norm_layers import batch_norm, norm
from seht.persample.products import (
    Convolution,
    Linear,
    PerturbedProduct,
    frugal_product,
    plain_product,
    second,
)
from seht.persample.signs import Signs, Slot
from seht.persample.uses import Use, shifted, tracker_of, use_of

# --- products -------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """The arguments of a product."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    op: Linear | Convolution
    turned: bool = False
    """The weight comes as (in, out)."""
    extra: Sequence[int] = ()
    """Zeros that x gets at its ends beforehand, as ``F.pad`` takes them."""


def _product(bind: Callable[..., Bound | None], into: int, out: int) -> Rule:
    def record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        y = func(*args, **kwargs)
        tracker = tracker_of(mode)
        bound = bind(*args, **kwargs)
        if bound is None or not tracker.weights.meets(tracker, bound.weight, bound.bias):
            tracker.follow(func, args, kwargs, y)
            return y, Use()
        rank = bound.x.dim()
        linear = isinstance(bound.op, Linear)
        axis = tracker.axis(bound.x, func, features=(-1,) if linear else tuple(range(1, rank)))
        if not linear and rank != bound.weight.dim():
            axis = None  # an image without a batch
        tracker.tag(y, axis)
        return y, use_of(mode, func, axis, bound.weight, bound.bias)

    def replay(mode: Mode, use: Use, func: Any, args: Any, kwargs: Any) -> Any:
        signs = use.signs(mode)
        if signs is None or use.axis is None:
            return func(*args, **kwargs)
        weight, bound = signs.live(use.weight), bind(*args, **kwargs)
        assert bound is not None
        if weight is None:
            y = func(*args, **kwargs)
        else:
            y = _perturbed(bound, (into, out), signs, weight, use.axis)
        return shifted(signs, use, y, bound.op.channel)

    return Rule(record, replay)


def _perturbed(bound: Bound, dims: tuple[int, int], signs: Signs, slot: Slot, axis: Axis) -> Tensor:
    """The product with each example's own weights."""
    part, op = slot.part, bound.op
    x = F.pad(bound.x, bound.extra) if bound.extra else bound.x

    def turned(weight: Tensor) -> Tensor:
        return weight.t() if bound.turned else weight

    w = turned(bound.weight)
    block = None if part.path else turned(signs.block(part.name))
    # A group's share of a convolution's weight, its dimension 1, serves every group.
    into, out = (
        signs.placed(slot, dim, axis, x, op.channel, op.groups if dim == 1 else 1) for dim in dims
    )
    stepped = signs.stepped(part.name, id(out), out)
    signed = second(op, x, block, lambda: turned(signs.shared(part)), into, stepped)
    step = signs.steps[part.name]
    if forward_ad._current_level >= 0:  # which knows no function of ours
        return plain_product(op, x, w, bound.bias, signed, step)
    if signs.frugal and axis.dim == 0:
        return frugal_product(op, x, w, bound.bias, signed)
    y: Tensor = PerturbedProduct.apply(op, x, w, bound.bias, signed, step)
    return y


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Bound | None:
    return Bound(input, weight, bias, Linear()) if weight.dim() == 2 else None


def _matmul(input: Tensor, other: Tensor, **rest: Any) -> Bound | None:
    fits = isinstance(other, Tensor) and other.dim() == 2 and input.dim() > 1 and not rest
    return Bound(input, other, None, Linear(), turned=True) if fits else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **rest: Any) -> Bound | None:
    fits = input.dim() == 1 and mat2.dim() == 2 and not rest
    return Bound(mat1, mat2, input, Linear(), turned=True) if fits else None


def _many(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else (list(value) * count)[:count]


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Bound | None:  # fmt: skip
    k = weight.dim() - 2
    wide = _many(dilation, k)
    extra: list[int] = []
    if isinstance(padding, str):
        total = [d * (s - 1) for d, s in zip(wide, weight.shape[2:], strict=True)]
        padding = 0 if padding == "valid" else [t // 2 for t in total]
        if padding and any(t % 2 for t in total):  # one more on the right, as PyTorch has it
            extra = [side for t in reversed(total) for side in (0, t % 2)]
    op = Convolution(_many(stride, k), _many(padding, k), wide, False, [0] * k, groups)
    return Bound(input, weight, bias, op, extra=extra)


def _transposed(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Bound | None:  # fmt: skip
    k = weight.dim() - 2
    wide, more = _many(dilation, k), _many(output_padding, k)
    op = Convolution(_many(stride, k), _many(padding, k), wide, True, more, groups)
    return Bound(input, weight, bias, op)


# --- bilinear -------------------------------------------------------------------------------------


def _bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return input1, input2, weight, bias


def _bilinear_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    y = func(*args, **kwargs)
    tracker = tracker_of(mode)
    x1, x2, w, b = _bilinear(*args, **kwargs)
    if not tracker.weights.meets(tracker, w, b):
        tracker.follow(func, args, kwargs, y)
        return y, Use()
    axes = [tracker.axis(x, func, features=(-1,)) for x in (x1, x2)]
    axis = axes[0] if axes[0] == axes[1] else None
    met = [a for a in axes if a is not None]
    broken = len(met) == 2 and axis is None
    tracker.tag(y, Broken("bilinear mixes examples") if broken else met[0] if met else None)
    return y, use_of(mode, func, axis, w, b)


def _bilinear_replay(mode: Mode, use: Use, func: Any, args: Any, kwargs: Any) -> Any:
    y, signs = func(*args, **kwargs), use.signs(mode)
    if signs is None or use.axis is None:
        return y
    x1, x2, _, _ = _bilinear(*args, **kwargs)
    weight = signs.live(use.weight)
    if weight is not None:
        into = signs.placed(weight, 1, use.axis, x1, -1)
        out = signs.placed(weight, 0, use.axis, y, -1)
        more = out * F.bilinear(x1 * into, x2, signs.shared(weight.part))
        y = y + signs.steps[weight.part.name] * more
    return shifted(signs, use, y, -1)


# --- embeddings -----------------------------------------------------------------------------------


def _table(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> Any:
    return input, weight, padding_idx


def _embedding_record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    y, inner = PADDED.record(mode, func, args, kwargs)
    ids, table, _ = _table(*args, **kwargs)
    tracker = tracker_of(mode)
    if tracker.get(table) is not None:  # rows that the examples have made
        tracker.follow(func, args, kwargs, y)
        return y, Use(inner=inner)
    tag = tracker.get(ids)
    tracker.tag(y, tag)
    use = use_of(mode, func, tag if isinstance(tag, Axis) else None, table)
    return y, use._replace(inner=inner)


def _embedding_replay(mode: Mode, use: Use, func: Any, args: Any, kwargs: Any) -> Any:
    y, signs = PADDED.replay(mode, use.inner, func, args, kwargs), use.signs(mode)
    slot = None if signs is None else signs.live(use.weight)
    if signs is None or use.axis is None or slot is None:
        return y
    ids, table, padding = _table(*args, **kwargs)
    owners = use.axis.owners(ids.shape[use.axis.dim], signs.n).to(ids.device)
    owners = along(owners, use.axis.dim, ids.dim())
    direction = F.embedding(ids, signs.shared(slot.part))
    rows = signs.matrix(slot, 0)
    if rows is not None:  # one sign for each (example, token), wherever the token stands
        direction = direction * rows[owners, ids].unsqueeze(-1)
    columns = signs.matrix(slot, 1)
    if columns is not None:
        direction = direction * columns[owners.expand(ids.shape)]
    if padding is not None:
        direction = direction.masked_fill((ids == padding % len(table)).unsqueeze(-1), 0)
    return y + signs.steps[slot.part.name] * direction


def _table_of(names: str, rule: Rule) -> dict[Any, Rule]:
    return dict.fromkeys(named(names), rule)


LAYERS: dict[Any, Rule] = {
    F.linear: _product(_linear, into=1, out=0),
    **_table_of("matmul mm __matmul__", _product(_matmul, into=0, out=1)),
    **_table_of("addmm", _product(_addmm, into=0, out=1)),
    **_table_of("conv1d conv2d conv3d", _product(_convolution, into=1, out=0)),
    **_table_of(
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        _product(_transposed, into=0, out=1),
    ),
    **_table_of("bilinear", Rule(_bilinear_record, _bilinear_replay)),
    F.embedding: Rule(_embedding_record, _embedding_replay),
    F.layer_norm: norm(F.layer_norm, -1),
    F.rms_norm: norm(F.rms_norm, -1),
    F.group_norm: norm(F.group_norm, 1),
    F.batch_norm: batch_norm(),
    F.instance_norm: norm(F.instance_norm, 1),
    F.multi_head_attention_forward: opened(F.multi_head_attention_forward),
    **recurrent.RULES,
}
