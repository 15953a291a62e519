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

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.engines import recurrent
from seht.engines.axes import Axis, Broken
from seht.engines.constants import PADDED
from seht.engines.kinks import spellings
from seht.engines.prefix import stand_in
from seht.engines.rules import Rule, opened
from seht.engines.signs import Convolution, Factors, Linear, Perturbed, factorise, frugal_product
from seht.engines.tracking import Part


class Slot(NamedTuple):
    """A probed weight in a call."""

    part: Part
    factors: Factors


class Use(NamedTuple):
    """What the centre pass found out about a call."""

    axis: Axis | None = None
    weight: Slot | None = None
    bias: Slot | None = None
    inner: Any = None
    """The decision of the operation's own rule, where it has one."""


def _slot(mode: Any, tensor: Any, axis: Axis | None, name: str) -> Slot | None:
    """Note the use of a weight; None where it keeps a shared direction."""
    part = mode.tracker.part(tensor)
    if part is None:
        return None
    if axis is None:
        mode.tracker.share(part, f"{name} applies it to what is the same for all examples")
        return None
    factors = factorise(part, mode.tracker.weight(part.name))
    if factors is None:
        mode.tracker.share(part, f"{name} sees it through a view that mixes its dimensions")
        return None
    mode.tracker.varied.add(part.name)
    return Slot(part, factors)


def _live(mode: Any, slot: Slot | None) -> Slot | None:
    return slot if slot is not None and slot.part.name in mode.signs.names else None


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
        if bound is None or (
            tracker.part(bound.weight) is None and tracker.part(bound.bias) is None
        ):
            tracker.follow(func, args, kwargs, y)
            return y, None
        rank = bound.x.dim()
        features = (-1,) if form.channel == -1 else tuple(range(1, rank))
        axis = tracker.axis(bound.x, func, features=features)
        if isinstance(bound.op, Convolution) and rank != bound.weight.dim():
            axis = None  # an image without a batch
        weight = _slot(mode, bound.weight, axis, name)
        bias = _slot(mode, bound.bias, axis, name)
        tracker.tag(y, axis)
        return y, Use(axis, weight, bias)

    def replay(mode: Any, use: Any, func: Any, args: Any, kwargs: Any) -> Any:
        signs = mode.signs
        if use is None or signs is None or use.axis is None:
            return func(*args, **kwargs)
        weight, bias = _live(mode, use.weight), _live(mode, use.bias)
        bound = form.bind(*args, **kwargs)
        assert bound is not None
        x, axis = bound.x, use.axis
        if weight is None:
            y = func(*args, **kwargs)
        else:
            part, factors = weight
            w, shared = bound.weight, signs.shared(part)
            if bound.turned:
                w, shared = w.t(), shared.t()
            groups = getattr(bound.op, "groups", 1)
            times = [groups if form.grouped == d else 1 for d in (form.into, form.out)]
            into = signs.placed(part, factors, form.into, axis, x, form.channel, times[0])
            out = signs.placed(part, factors, form.out, axis, x, form.channel, times[1])
            step = signs.steps[part.name]
            out = signs.stepped(part.name, id(out), out)
            if signs.frugal and axis.dim == 0:
                y = frugal_product(bound.op, x, w, bound.bias, shared, into, out)
            else:
                y = Perturbed.apply(bound.op, x, w, bound.bias, shared, into, out, step)
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
    if tracker.part(w) is None and tracker.part(b) is None:
        tracker.follow(func, args, kwargs, y)
        return y, None
    axes = [tracker.axis(x, func, features=(-1,)) for x in (x1, x2)]
    axis = axes[0] if axes[0] == axes[1] else None
    weight, bias = _slot(mode, w, axis, "bilinear"), _slot(mode, b, axis, "bilinear")
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
    weight, bias = _live(mode, use.weight), _live(mode, use.bias)
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
    tag = tracker.get(ids)
    axis = tag if isinstance(tag, Axis) else None
    slot = _slot(mode, table, axis, "embedding")
    tracker.tag(y, tag)
    return y, Use(axis, slot, None, inner)


def _embedding_replay(mode: Any, use: Any, func: Any, args: Any, kwargs: Any) -> Any:
    y = PADDED.replay(mode, use.inner, func, args, kwargs)
    signs = mode.signs
    slot = None if signs is None else _live(mode, use.weight)
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


# --- norms ----------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """Where a norm has its weight and bias, and whether they lie along the channels."""

    weight: int
    bias: int | None
    channels: bool


def _norm(form: Norm) -> Rule:
    def pick(place: int | None, key: str, args: Any, kwargs: Any) -> Any:
        if key in kwargs:
            return kwargs[key]
        return args[place] if place is not None and len(args) > place else None

    def plain(args: Any, kwargs: Any) -> tuple[Any, Any]:
        bare = [None if i in (form.weight, form.bias) else a for i, a in enumerate(args)]
        return bare, {k: None if k in ("weight", "bias") else v for k, v in kwargs.items()}

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tracker = mode.tracker
        w, b = pick(form.weight, "weight", args, kwargs), pick(form.bias, "bias", args, kwargs)
        y = func(*args, **kwargs)
        if tracker.part(w) is None and tracker.part(b) is None:
            tracker.follow(func, args, kwargs, y)
            return y, None
        tracker.follow(func, args, kwargs, y, weigh=False)
        tag = tracker.get(y)
        axis = tag if isinstance(tag, Axis) else None
        slots = _slot(mode, w, axis, func.__name__), _slot(mode, b, axis, func.__name__)
        return y, Use(axis, *slots)

    def replay(mode: Any, use: Any, func: Any, args: Any, kwargs: Any) -> Any:
        y = func(*args, **kwargs)
        signs = mode.signs
        if use is None or signs is None or use.axis is None:
            return y
        weight, bias = _live(mode, use.weight), _live(mode, use.bias)
        if weight is not None:
            bare, named = plain(args, kwargs)
            hat = func(*bare, **named)
            y = y + signs.steps[weight.part.name] * (spread(signs, weight, use.axis, y) * hat)
        if bias is not None:
            y = y + signs.steps[bias.part.name] * spread(signs, bias, use.axis, y)
        return y

    def spread(signs: Any, slot: Slot, axis: Axis, y: Tensor) -> Tensor:
        whole = signs.owned(signs.whole(*slot), axis, y.shape[axis.dim])
        own = whole.shape[1:]
        shape = [1] * y.dim()
        shape[axis.dim] = whole.shape[0]
        first = 1 if form.channels else y.dim() - len(own)
        shape[first : first + len(own)] = own
        return whole.reshape(shape)

    return Rule(record, replay)


# --- batch norm with its statistics held ----------------------------------------------------------


def _statistics(
    input: Tensor, running_mean: Any, running_var: Any, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Tensor, Tensor | None, Tensor | None, bool, float]:  # fmt: skip
    return input, weight, bias, training or running_mean is None, eps


def _held(args: Any, kwargs: Any, mean: Tensor, var: Tensor) -> Tensor:
    """Batch norm with these statistics, by operations that know their gradient."""
    x, weight, bias, _, eps = _statistics(*args, **kwargs)
    shape = [1, -1] + [1] * (x.dim() - 2)
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    y = (x - mean.view(shape)) * scale.view(shape)
    return y if bias is None else y + bias.view(shape)


def _batch_norm() -> Rule:
    plain = _norm(Norm(3, 4, channels=True))

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tracker = mode.tracker
        x, weight, bias, batch, _ = _statistics(*args, **kwargs)
        tag = tracker.get(x)
        if tracker.coupling != "frozen" or not batch or not isinstance(tag, Axis):
            y, use = plain.record(mode, func, args, kwargs)
            return y, (use, None)
        with torch.no_grad():
            func(*args, **kwargs)  # moves the running statistics, once
        rest = [0, *range(2, x.dim())]
        mean, var = x.mean(rest), x.var(rest, correction=0)
        tracker.tag(mean, None)
        tracker.tag(var, None)
        tracker.holds = True
        y = _held(args, kwargs, mean, var)
        for tensor in (weight, bias):
            tracker.share(tracker.part(tensor), "batch_norm with held statistics")
        tracker.tag(y, tag)
        return y, (None, (mean, var))

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        use, held = decision
        if held is None:
            return plain.replay(mode, use, func, args, kwargs)
        # Leaves of the perturbed graphs whose gradient goes on into the centre's statistics.
        return _held(args, kwargs, *(stand_in(part, mode.aliases) for part in held))

    return Rule(record, replay)


LAYERS: dict[Any, Rule] = {
    F.linear: _product(Product(_linear, into=1, out=0, channel=-1)),
    **dict.fromkeys(
        spellings("matmul mm __matmul__"), _product(Product(_matmul, into=0, out=1, channel=-1))
    ),
    **dict.fromkeys(spellings("addmm"), _product(Product(_addmm, into=0, out=1, channel=-1))),
    **dict.fromkeys(
        spellings("conv1d conv2d conv3d"),
        _product(Product(_convolution, into=1, out=0, channel=1, grouped=1)),
    ),
    **dict.fromkeys(
        spellings("conv_transpose1d conv_transpose2d conv_transpose3d"),
        _product(Product(_transposed, into=0, out=1, channel=1, grouped=1)),
    ),
    **dict.fromkeys(spellings("bilinear"), Rule(_bilinear_record, _bilinear_replay)),
    F.embedding: Rule(_embedding_record, _embedding_replay),
    F.layer_norm: _norm(Norm(2, 3, channels=False)),
    F.rms_norm: _norm(Norm(2, None, channels=False)),
    F.group_norm: _norm(Norm(2, 3, channels=True)),
    F.batch_norm: _batch_norm(),
    F.instance_norm: _norm(Norm(3, 4, channels=True)),
    F.multi_head_attention_forward: opened(F.multi_head_attention_forward),
    **recurrent.RULES,
}
