"""How calls use probed weights: noted in the centre pass, used in the perturbed passes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from seht.operators.axes import Axis
from seht.operators.rules import Mode
from seht.persample.signs import Signs, Slot, slot_of
from seht.persample.tracking import ExampleTracker
from seht.tensors.trees import StandIns


class Replaying(Mode, Protocol):
    """The mode of a perturbed pass, as the rules of layers need it (``replay/replayer.py``)."""

    signs: Signs | None
    """The probes of the examples, and how far this pass goes along them."""
    stand_ins: StandIns


def tracker_of(mode: Mode) -> ExampleTracker:
    """The mode's tracker, which exists whenever layers have per-sample rules."""
    return cast(ExampleTracker, mode.tracker)


class Use(NamedTuple):
    """What the centre pass noted about one call."""

    axis: Axis | None = None
    weight: Slot | None = None
    bias: Slot | None = None
    inner: Any = None
    """The decision of the operation's own rule, where it has one."""

    def signs(self, mode: Mode) -> Signs | None:
        """The signs that this pass applies here, if any."""
        return None if self.axis is None else cast(Replaying, mode).signs


def use_of(mode: Mode, func: Any, axis: Axis | None, weight: Any, bias: Any = None) -> Use:
    """Note what a call does with a weight and a bias, where they are probed."""
    return Use(axis, *(_slot(mode, func, axis, tensor) for tensor in (weight, bias)))


def _slot(mode: Mode, func: Any, axis: Axis | None, tensor: Any) -> Slot | None:
    """The place of a weight; None where it keeps a shared direction."""
    weights = tracker_of(mode).weights
    part = weights.part(tensor)
    if part is None:
        return None
    if axis is None:
        weights.share(part, f"{func.__name__} applies it to what is the same for all examples")
        return None
    slot = slot_of(part, weights[part.name])
    if slot is None:
        weights.share(part, f"{func.__name__} sees it through a view that mixes its dimensions")
        return None
    weights.varied.add(part.name)
    return slot


def shifted(signs: Signs, use: Use, y: Tensor, channel: int) -> Tensor:
    """The output with each example's own step in the bias, which lies along the ``channel``."""
    bias = signs.live(use.bias)
    if bias is None or use.axis is None:
        return y
    return y + signs.steps[bias.part.name] * signs.spread(bias, use.axis, y, channel)
