"""The options of a command as a table whose rows read like the lines of its help.

A number is in its range, or a mistake said in one line: Python reads more as a number than a user
means, digits of other scripts, ``1_0``, ``0x10``.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


def add_options(parser: Any, *rows: tuple[Any, ...]) -> None:
    """Add ``(spelling, help, type, default)`` of each row; the last two may be left out.

    ``"--seed N"`` takes a value, ``"--model NAME ..."`` may be repeated, ``"--engine {a,b}"`` takes
    one of these, ``"--fast"`` is a switch, and ``"target FILE"`` an argument without a dash.
    """
    for spelling, text, *rest in rows:
        name, _, value = spelling.partition(" ")
        if not value:
            parser.add_argument(name, action="store_true", help=text)
            continue
        how: dict[str, Any] = dict(zip(("type", "default"), rest, strict=False))
        if value.startswith("{"):
            how["choices"] = value.strip("{}").split(",")
        else:
            how["metavar"] = value.removesuffix(" ...")
        if value.endswith(" ..."):
            how["action"] = "append"
        parser.add_argument(name, help=text, **how)


# --- numbers in their range -------------------------------------------------------------------

SEED = 2**63 - 1
"""The largest seed that torch's generators take."""
COUNT = 10**6
"""The largest count that an option accepts."""

_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf)", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,40}", re.ASCII)


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number in this range, as a ``type`` of argparse."""
    what = f"must be a whole number from {least:,} to {most:,}"
    return lambda text: _read(as_whole, text, lambda number: least <= number <= most, what)


def real(least: float = 0.0, *, above: bool = False) -> Callable[[str], float]:
    """A finite number from ``least`` on, or ``above`` it, as a ``type`` of argparse."""
    what = f"must be a finite number {'above' if above else 'of at least'} {least:g}"
    edge = math.nextafter(least, math.inf) if above else least
    return lambda text: _read(as_real, text, lambda number: edge <= number < math.inf, what)


def _read(
    parse: Callable[[str], Number], text: str, fits: Callable[[Number], bool], what: str
) -> Number:
    with suppress(ValueError):
        number = parse(text)
        if fits(number):
            return number
    raise argparse.ArgumentTypeError(f"{what}, not {shown(text)}")


def as_whole(text: str) -> int:
    """Decimal digits with a sign, and nothing else; otherwise a ``ValueError``."""
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(f"{shown(text)} is no whole number")
    return int(text)


def as_real(text: str) -> float:
    """A decimal number, ``nan`` or ``inf``; otherwise a ``ValueError``."""
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError(f"{shown(text)} is no number")
    return float(text)


def shown(text: str) -> str:
    """What was given, or its beginning."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
