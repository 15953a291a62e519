"""How figures are written: as many digits as their error has a say in."""

from __future__ import annotations

import math

from seht.lab.report.stats import Difference, Mean

MINUS = "\u2212"


def fixed(value: float, places: int = 2, sign: str = "") -> str:
    """With so many places, and its sign where that is ``"+"``."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:{sign},.{places}f}".replace("-", MINUS)


def plain(summary: Mean | None, places: int = 2) -> str:
    """``97.31 ± 0.12``, with fixed places, as the paper writes accuracies and perplexities."""
    if summary is None:
        return ""
    if summary.error is None:
        return fixed(summary.value, places)
    return f"{fixed(summary.value, places)} ± {fixed(summary.error, places)}"


def measured(summary: Mean | None) -> str:
    """``1,234 ± 56``: two digits of the error, and the value as far as those go."""
    if summary is None:
        return ""
    value, error = summary.value, summary.error
    if not math.isfinite(value):
        return "not finite"
    if not error or not math.isfinite(error):
        return significant(value)
    places = min(6, max(0, 1 - math.floor(math.log10(error))))
    return f"{fixed(value, places)} ± {fixed(error, places)}"


def significant(value: float, digits: int = 3) -> str:
    """Without an error: three digits."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -5 < size < 7:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return fixed(value, max(0, digits - 1 - size))


def interval(difference: Difference | None, places: int = 2) -> str:
    """``+0.42 [−0.10, +0.94]``."""
    if difference is None:
        return ""
    text = fixed(difference.value, places, "+")
    if difference.low is None or difference.high is None:
        return text
    return f"{text} [{fixed(difference.low, places, '+')}, {fixed(difference.high, places, '+')}]"
