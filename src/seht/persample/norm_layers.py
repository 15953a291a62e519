"""Per-sample rules of norms: one sign for each example and channel; held batch statistics."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.axes import Axis
from seht.operators.operator import by_name
from seht.operators.rules import Mode, Recording, Rule
from seht.persample.uses import Replaying, Use, shifted, tracker_of, use_of
from seht.tensors.trees import stand_in


def norm(function: Any, channel: int) -> Rule:
    """Scale and shift of each example's own, on what the norm itself puts out; they lie along the
    ``channel`` 1 or the last dimensions.
    """
    named = by_name(function)

    def record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tracker = tracker_of(mode)
        given = named(args, kwargs)
        weight, bias = given.get("weight"), given.get("bias")
        y = func(*args, **kwargs)
        probed = tracker.weights.probed(weight, bias)
        tracker.follow(func, args, kwargs, y, weigh=not probed)
        if not probed:
            return y, Use()
        tag = tracker.get(y)
        return y, use_of(mode, func, tag if isinstance(tag, Axis) else None, weight, bias)

    def replay(mode: Mode, use: Use, func: Any, args: Any, kwargs: Any) -> Any:
        y, signs = func(*args, **kwargs), use.signs(mode)
        if signs is None or use.axis is None:
            return y
        weight = signs.live(use.weight)
        if weight is not None:
            given = named(args, kwargs)
            hat = func(**{k: None if k in ("weight", "bias") else v for k, v in given.items()})
            own = signs.spread(weight, use.axis, y, channel)
            y = y + signs.steps[weight.part.name] * (own * hat)
        return shifted(signs, use, y, channel)

    return Rule(record, replay)


# --- batch norm with its statistics held ----------------------------------------------------------


def _held(given: dict[str, Any], mean: Tensor, var: Tensor) -> Tensor:
    """Batch norm with these statistics, by operations that know their gradient."""
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    shape = [1, -1] + [1] * (x.dim() - 2)
    scale = torch.rsqrt(var + given.get("eps", 1e-5))
    scale = scale if weight is None else scale * weight
    y: Tensor = (x - mean.view(shape)) * scale.view(shape)
    return y if bias is None else y + bias.view(shape)


def batch_norm() -> Rule:
    """Batch norm: as any norm in eval mode; in train mode with its statistics held, if asked."""
    plain, named = norm(F.batch_norm, 1), by_name(F.batch_norm)

    def record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tracker = tracker_of(mode)
        given = named(args, kwargs)
        x, tag = given["input"], tracker.get(given["input"])
        batch = given.get("training", False) or given["running_mean"] is None
        if tracker.coupling != "frozen" or not batch or not isinstance(tag, Axis):
            y, use = plain.record(mode, func, args, kwargs)
            return y, (use, None)
        with torch.no_grad():
            func(*args, **kwargs)  # moves the running statistics, once
        rest = [0, *range(2, x.dim())]
        mean, var = x.mean(rest), x.var(rest, correction=0)
        tracker.tag(mean, None)
        tracker.tag(var, None)
        tracker.hold()
        y = _held(given, mean, var)
        for tensor in (given.get("weight"), given.get("bias")):
            tracker.weights.share(tracker.weights.part(tensor), "batch_norm with held statistics")
        tracker.tag(y, tag)
        return y, (None, (mean, var))

    def replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        use, held = decision
        if held is None:
            return plain.replay(mode, use, func, args, kwargs)
        # Leaves of the perturbed graphs whose gradient goes on into the centre's statistics.
        leaves = [stand_in(part, cast(Replaying, mode).stand_ins) for part in held]
        return _held(named(args, kwargs), *leaves)

    return Rule(record, replay)
