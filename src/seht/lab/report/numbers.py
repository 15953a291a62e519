"""How figures are written: as many digits as their error has a say in."""

from __future__ import annotations

import math

from seht.lab.report.stats import Difference, Mean

MINUS = "\u2212"


def fixed(value: float, places: int = 2) -> str:
    """With so many places."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.{places}f}".replace("-", MINUS)


def signed(value: float, places: int = 2) -> str:
    """The same with its sign."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:+,.{places}f}".replace("-", MINUS)


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
    text = signed(difference.value, places)
    if difference.low is None or difference.high is None:
        return text
    return f"{text} [{signed(difference.low, places)}, {signed(difference.high, places)}]"


def duration(seconds: float) -> str:
    """``45 s``, ``3.2 min``, ``5.1 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
