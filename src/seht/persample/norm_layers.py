"""Per-sample rules of norms: one sign for each example and channel; held batch statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seht.operators.axes.axes import Axis
from seht.operators.rules import Rule
from seht.persample.uses import Slot, Use, live, slot_of
from seht.tensors.trees import stand_in

# --- norms ----------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """Where a norm has its weight and bias, and whether they lie along the channels."""

    weight: int
    bias: int | None
    channels: bool


def norm(form: Norm) -> Rule:
    """Scale and shift of each example's own, on what the norm itself puts out."""

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
        if not tracker.weights.probed(w, b):
            tracker.follow(func, args, kwargs, y)
            return y, None
        tracker.follow(func, args, kwargs, y, weigh=False)
        tag = tracker.get(y)
        axis = tag if isinstance(tag, Axis) else None
        slots = slot_of(mode, w, axis, func.__name__), slot_of(mode, b, axis, func.__name__)
        return y, Use(axis, *slots)

    def replay(mode: Any, use: Any, func: Any, args: Any, kwargs: Any) -> Any:
        y = func(*args, **kwargs)
        signs = mode.signs
        if use is None or signs is None or use.axis is None:
            return y
        weight, bias = live(mode, use.weight), live(mode, use.bias)
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


def batch_norm() -> Rule:
    """Batch norm: as any norm in eval mode; in train mode with its statistics held, if asked."""
    plain = norm(Norm(3, 4, channels=True))

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
            tracker.weights.share(tracker.weights.part(tensor), "batch_norm with held statistics")
        tracker.tag(y, tag)
        return y, (None, (mean, var))

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        use, held = decision
        if held is None:
            return plain.replay(mode, use, func, args, kwargs)
        # Leaves of the perturbed graphs whose gradient goes on into the centre's statistics.
        return _held(args, kwargs, *(stand_in(part, mode.aliases) for part in held))

    return Rule(record, replay)
