"""The ranges of options, checked where a method is made."""

from __future__ import annotations

import math


def not_negative(name: str, value: float) -> float:
    """A finite number, 0 or more."""
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number, 0 or more, not {value!r}")
    return value


def positive(name: str, value: float) -> float:
    """A finite number above 0."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
    return value


def share(name: str, value: float, *, one: bool) -> float:
    """A number from 0 up to 1, with or without 1 itself."""
    if not 0 <= value <= 1 or (value == 1 and not one):
        raise ValueError(f"{name} must be in [0, 1{']' if one else ')'}, not {value!r}")
    return value


def at_least(name: str, value: int, least: int) -> int:
    """A whole number, ``least`` or more."""
    if value < least:
        raise ValueError(f"{name} must be {least} or more, not {value}")
    return value
