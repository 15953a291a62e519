"""When a step is penalised, and by how much."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def weight_in_force(base: float, step: int, *, every: int, warmup: int, ramp: int) -> float:
    """The weight of a step, 0 on a plain one.

    Penalised are the steps with ``step >= warmup`` and ``(step - warmup) % every == 0``, at
    ``every`` times the weight, which grows over the first ``ramp`` of them.
    """
    since = step - warmup
    if since < 0 or since % every:
        return 0.0
    grown = min(1.0, (since + 1) / ramp) if ramp else 1.0
    return base * grown * every


def check_weight(weight: Any) -> float:
    """A number that can be a weight."""
    if isinstance(weight, Tensor):
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"weight must be a number or a function of the step, not {weight!r}")
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weight must be finite and not negative, not {weight!r}")
    return float(weight)


def check_count(name: str, value: Any, least: int) -> None:
    """A whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
