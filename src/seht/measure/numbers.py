"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

MINUS = "\u2212"


def number(value: float | None, digits: int = 3) -> str:
    """This many significant digits, with separators; a dash for a missing number."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size < 7:
        text = f"{value:.{digits - 1}e}"
        mantissa, _, power = text.partition("e")
        text = f"{mantissa}e{int(power)}"
    else:
        text = f"{round(value, digits - 1 - size):,.{max(0, digits - 1 - size)}f}"
    return text.replace("-", MINUS)


def with_error(value: float, error: float) -> str:
    """``511 ± 13``: the error with two digits, the value as far as that reaches."""
    if not math.isfinite(error) or error <= 0 or not math.isfinite(value):
        return number(value, 4)
    size = math.floor(math.log10(error)) - 1
    if not -6 <= size < 6:
        return f"{number(value, 4)} ± {number(error, 2)}"
    places = max(0, -size)
    shown = round(value, -size) + 0.0  # which takes the sign off a zero
    text = f"{shown:,.{places}f} ± {round(error, -size):,.{places}f}"
    return text.replace("-", MINUS)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first row is its head, the first column stands left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def said(title: str, *tables: Sequence[Sequence[str]]) -> str:
    """A title and the tables below it, as ``print(result)`` shows them."""
    return "\n".join([title, *(line for rows in tables for line in aligned(rows))])
