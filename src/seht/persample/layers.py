"""Per-sample layer rules: what an operation that uses a probed weight does with one per example.

One entry of the table for each operation. ``Product`` entries say which dimension of the weight
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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seht.operators.axes.axes import Axis, Broken
from seht.operators.composed import opened
from seht.operators.layers import PADDED
from seht.operators.operator import named
from seht.operators.rules import Rule
from seht.persample import recurrent
from seht.persample.norm_layers import Norm, batch_norm, norm
from seht.persample.products import (
    Convolution,
    Linear,
    Perturbed,
    frugal_product,
    plain_product,
    second,
)
from seht.persample.uses import Use, live, slot_of
from seht.persample.weights import Part

# --- products -------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """The arguments of a product."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    op: Any
    turned: bool = False
    """The weight comes as (in, out)."""


class Product(NamedTuple):
    """One line of the table above."""

    bind: Callable[..., Bound | None]
    into: int
    out: int
    channel: int
    grouped: int | None = None
    """Which of the weight's dimensions is repeated for each group."""


def _product(form: Product) -> Rule:
    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        y = func(*args, **kwargs)
        tracker = mode.tracker
        bound = form.bind(*args, **kwargs)
        name = func.__name__
        if bound is None or not tracker.weights.meets(tracker, bound.weight, bound.bias):
            tracker.follow(func, args, kwargs, y)
            return y, None
        rank = bound.x.dim()
        features = (-1,) if form.channel == -1 else tuple(range(1, rank))
        axis = tracker.axis(bound.x, func, features=features)
        if isinstance(bound.op, Convolution) and rank != bound.weight.dim():
            axis = None  # an image without a batch
        weight = slot_of(mode, bound.weight, axis, name)
        bias = slot_of(mode, bound.bias, axis, name)
        tracker.tag(y, axis)
        return y, Use(axis, weight, bias)

    def replay(mode: Any, use: Any, func: Any, args: Any, kwargs: Any) -> Any:
        signs = mode.signs
        if use is None or signs is None or use.axis is None:
            return func(*args, **kwargs)
        weight, bias = live(mode, use.weight), live(mode, use.bias)
        bound = form.bind(*args, **kwargs)
        assert bound is not None
        x, axis = bound.x, use.axis
        if weight is None:
            y = func(*args, **kwargs)
        else:
            part, factors = weight
            w = bound.weight.t() if bound.turned else bound.weight

            def whole(part: Part = part) -> Tensor:
                return signs.shared(part).t() if bound.turned else signs.shared(part)

            block = None if part.path else signs.block(part.name)
            if block is not None and bound.turned:
                block = block.t()
            groups = getattr(bound.op, "groups", 1)
            times = [groups if form.grouped == d else 1 for d in (form.into, form.out)]
            into = signs.placed(part, factors, form.into, axis, x, form.channel, times[0])
            out = signs.placed(part, factors, form.out, axis, x, form.channel, times[1])
            step = signs.steps[part.name]
            out = signs.stepped(part.name, id(out), out)
            signed = second(bound.op, x, block, whole, into, out)
            if forward_ad._current_level >= 0:  # which knows no function of ours
                y = plain_product(bound.op, x, w, bound.bias, signed, step)
            elif signs.frugal and axis.dim == 0:
                y = frugal_product(bound.op, x, w, bound.bias, signed)
            else:
                y = Perturbed.apply(bound.op, x, w, bound.bias, signed, step)
        if bias is not None:
            part, factors = bias
            placed = signs.placed(part, factors, 0, axis, y, form.channel)
            placed = placed * _shared_line(signs, part, y.dim(), form.channel)
            y = y + signs.steps[part.name] * placed
        return y

    return Rule(record, replay)


def _shared_line(signs: Any, part: Part, rank: int, channel: int) -> Tensor:
    shape = [1] * rank
    shape[channel % rank] = -1
    line: Tensor = signs.shared(part).reshape(shape)
    return line


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
    if isinstance(padding, str):
        total = [d * (s - 1) for d, s in zip(wide, weight.shape[2:], strict=True)]
        padding = 0 if padding == "valid" else [t // 2 for t in total]
        if padding and any(t % 2 for t in total):  # one more on the right, as PyTorch has it
            extra = [side for t in reversed(total) for side in (0, t % 2)]
            input = F.pad(input, extra)
    op = Convolution(_many(stride, k), _many(padding, k), wide, False, [0] * k, groups)
    return Bound(input, weight, bias, op)


def _transposed(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Bound | None:  # fmt: skip
    k = weight.dim() - 2
    wide, more = _many(dilation, k), _many(output_padding, k)
    op = Convolution(_many(stride, k), _many(padding, k), wide, True, more, groups)
    return Bound(input, weight, bias, op)


# --- bilinear -------------------------------------------------------------------------------------


def _bilinear_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    y = func(*args, **kwargs)
    tracker = mode.tracker
    x1, x2, w, b = _bilinear(*args, **kwargs)
    if not tracker.weights.meets(tracker, w, b):
        tracker.follow(func, args, kwargs, y)
        return y, None
    axes = [tracker.axis(x, func, features=(-1,)) for x in (x1, x2)]
    axis = axes[0] if axes[0] == axes[1] else None
    weight, bias = slot_of(mode, w, axis, "bilinear"), slot_of(mode, b, axis, "bilinear")
    met = [a for a in axes if a is not None]
    broken = len(met) == 2 and axis is None
    tracker.tag(y, Broken("bilinear mixes examples") if broken else met[0] if met else None)
    return y, Use(axis, weight, bias)


def _bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return input1, input2, weight, bias


def _bilinear_replay(mode: Any, use: Any, func: Any, args: Any, kwargs: Any) -> Any:
    y = func(*args, **kwargs)
    signs = mode.signs
    if use is None or signs is None or use.axis is None:
        return y
    x1, x2, _, _ = _bilinear(*args, **kwargs)
    weight, bias = live(mode, use.weight), live(mode, use.bias)
    if weight is not None:
        part, factors = weight
        into = signs.placed(part, factors, 1, use.axis, x1, -1)
        out = signs.placed(part, factors, 0, use.axis, y, -1)
        y = y + signs.steps[part.name] * (out * F.bilinear(x1 * into, x2, signs.shared(part)))
    if bias is not None:
        part, factors = bias
        placed = signs.placed(part, factors, 0, use.axis, y, -1)
        y = y + signs.steps[part.name] * (placed * _shared_line(signs, part, y.dim(), -1))
    return y


# --- embeddings -----------------------------------------------------------------------------------


def _table(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> Any:
    return input, weight, padding_idx


def _embedding_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    y, inner = PADDED.record(mode, func, args, kwargs)
    ids, table, _ = _table(*args, **kwargs)
    tracker = mode.tracker
    if tracker.get(table) is not None:  # rows that the examples have made
        tracker.follow(func, args, kwargs, y)
        return y, Use(inner=inner)
    tag = tracker.get(ids)
    axis = tag if isinstance(tag, Axis) else None
    slot = slot_of(mode, table, axis, "embedding")
    tracker.tag(y, tag)
    return y, Use(axis, slot, None, inner)


def _embedding_replay(mode: Any, use: Any, func: Any, args: Any, kwargs: Any) -> Any:
    y = PADDED.replay(mode, use.inner, func, args, kwargs)
    signs = mode.signs
    slot = None if signs is None else live(mode, use.weight)
    if slot is None:
        return y
    ids, table, padding = _table(*args, **kwargs)
    part, factors = slot
    shared = signs.shared(part)
    owners = use.axis.owners(ids.shape[use.axis.dim], signs.n).to(ids.device)
    owners = owners.view([-1 if d == use.axis.dim else 1 for d in range(ids.dim())])
    direction = F.embedding(ids, shared)
    rows = signs.matrix(part, factors, 0)
    if rows is not None:  # one sign for each (example, token), wherever the token stands
        direction = direction * rows[owners, ids].unsqueeze(-1)
    columns = signs.matrix(part, factors, 1)
    if columns is not None:
        direction = direction * columns[owners.expand(ids.shape)]
    if padding is not None:
        direction = direction.masked_fill((ids == padding % len(table)).unsqueeze(-1), 0)
    return y + signs.steps[part.name] * direction


LAYERS: dict[Any, Rule] = {
    F.linear: _product(Product(_linear, into=1, out=0, channel=-1)),
    **dict.fromkeys(
        named("matmul mm __matmul__"), _product(Product(_matmul, into=0, out=1, channel=-1))
    ),
    **dict.fromkeys(named("addmm"), _product(Product(_addmm, into=0, out=1, channel=-1))),
    **dict.fromkeys(
        named("conv1d conv2d conv3d"),
        _product(Product(_convolution, into=1, out=0, channel=1, grouped=1)),
    ),
    **dict.fromkeys(
        named("conv_transpose1d conv_transpose2d conv_transpose3d"),
        _product(Product(_transposed, into=0, out=1, channel=1, grouped=1)),
    ),
    **dict.fromkeys(named("bilinear"), Rule(_bilinear_record, _bilinear_replay)),
    F.embedding: Rule(_embedding_record, _embedding_replay),
    F.layer_norm: norm(Norm(2, 3, channels=False)),
    F.rms_norm: norm(Norm(2, None, channels=False)),
    F.group_norm: norm(Norm(2, 3, channels=True)),
    F.batch_norm: batch_norm(),
    F.instance_norm: norm(Norm(3, 4, channels=True)),
    F.multi_head_attention_forward: opened(F.multi_head_attention_forward),
    **recurrent.RULES,
}
