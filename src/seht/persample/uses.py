"""What the centre pass notes about a call that uses a probed weight."""

from __future__ import annotations

from typing import Any, NamedTuple

from seht.operators.axes.axes import Axis
from seht.persample.signs import Factors, factorise
from seht.persample.weights import Part


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


def slot_of(mode: Any, tensor: Any, axis: Axis | None, name: str) -> Slot | None:
    """Note the use of a weight; None where it keeps a shared direction."""
    weights = mode.tracker.weights
    part = weights.part(tensor)
    if part is None:
        return None
    if axis is None:
        weights.share(part, f"{name} applies it to what is the same for all examples")
        return None
    factors = factorise(part, weights[part.name])
    if factors is None:
        weights.share(part, f"{name} sees it through a view that mixes its dimensions")
        return None
    weights.varied.add(part.name)
    return Slot(part, factors)


def live(mode: Any, slot: Slot | None) -> Slot | None:
    """The weight, where it has a direction for each example."""
    return slot if slot is not None and slot.part.name in mode.signs.names else None
